"""CUDA graphs of decode steps: forward and sampler apart, for a ladder of row counts."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """Two graphs to be replayed in turn, and where their results lie until the next replay of any.

    They are apart so that logits can be changed, or a mask arrive, in between. `logits` float32
    [rows, vocab_size], `ids` int32 [rows].
    """

    forward: torch.cuda.CUDAGraph
    sampler: torch.cuda.CUDAGraph
    logits: Tensor
    ids: Tensor


def ladder(most: int) -> list[int]:
    """Row counts to capture: every power of two, steps of 8 up to 64, of 32 up to 256, of 64 beyond; `most` last."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, most, 64)}
    return sorted({size for size in sizes if size < most} | {most})


class DecodeGraphs:
    """Graphs by row count, captured largest first so that the smaller ones fit in its memory."""

    def __init__(
        self,
        most_rows: int,
        forward: Callable[[int], Tensor],
        sample: Callable[[int, Tensor], Tensor],
    ) -> None:
        """`forward(rows)` answers logits, `sample(rows, logits)` ids; both are run once before they are captured."""
        self._sizes = ladder(most_rows)
        self._graphs: dict[int, DecodeGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        for rows in reversed(self._sizes):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                sample(rows, forward(rows))  # compiles what is not compiled, and warms up the libraries
            torch.cuda.current_stream().wait_stream(stream)
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(first, pool=pool):
                logits = forward(rows)
            with torch.cuda.graph(second, pool=pool):
                ids = sample(rows, logits)
            self._graphs[rows] = DecodeGraph(first, second, logits, ids)

    def round_up(self, rows: int) -> int:
        """Rows of the smallest graph for `rows` decodes, 0 when there is none."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else 0

    def __getitem__(self, rows: int) -> DecodeGraph:
        return self._graphs[rows]
