"""The one copy that takes a step's numbers to the GPU: columns of int32 in one buffer.

A layout depends on four counts only, so that a CUDA graph captured for some number of rows finds
its columns at the same addresses in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.short_chunks import ITEM_COLUMNS

#: Columns begin at multiples of this many elements: kernels are compiled for pointers aligned to 16 bytes.
_ALIGNMENT = 4

Ints = npt.NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many tokens, sampled rows, tiles of long chunks and items of short ones a step has, padding included."""

    num_tokens: int
    num_sampled: int
    num_tiles: int = 0
    num_items: int = 0

    @lru_cache(256)  # noqa: B019 - of a value, of which a runner sees few
    def offsets(self) -> tuple[list[tuple[int, int]], int]:
        """(begin, end) of each column in the order of `Columns`, and the size of all."""
        tokens, rows = self.num_tokens, self.num_sampled
        sizes = (2 * rows, *(tokens,) * 3, *(rows,) * 7, 2 * self.num_tiles, ITEM_COLUMNS * self.num_items)
        spans, end = [], 0
        for size in sizes:
            spans.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return spans, end


@dataclass(frozen=True, slots=True, eq=False)
class Columns(Generic[Array]):
    """Slices of a buffer, all int32. Three hold float32 bits (`temperature`, `top_p`, `min_p`), `seeds`
    [2 * num_sampled] int64; `tiles` is [2 * num_tiles], `items` [5 * num_items]. `index` are the rows of sampled
    tokens, `places` their indexes in their sequences.
    """

    seeds: Array
    ids: Array
    positions: Array
    seq_index: Array
    index: Array
    places: Array
    slots: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    tiles: Array
    items: Array


class Staging:
    """Pinned buffers, one for each step in flight, and the one on the device that they are copied to."""

    def __init__(self, capacity: Layout, *, depth: int, device: torch.device) -> None:
        size = capacity.offsets()[1]
        pin = device.type == "cuda"  # a CPU stands in for a GPU in tests
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(depth)]
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._pinned]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0

    def host(self, layout: Layout) -> Columns[Ints]:
        """Columns to fill for the next step. The step that used the buffer before must have been collected."""
        self._turn = (self._turn + 1) % len(self._pinned)
        array = self._arrays[self._turn]
        return Columns(*(array[begin:end] for begin, end in layout.offsets()[0]))

    def send(self, layout: Layout) -> None:
        """Begin the copy of what `host` handed out."""
        size = layout.offsets()[1]
        self._device[:size].copy_(self._pinned[self._turn][:size], non_blocking=True)

    def device(self, layout: Layout) -> Columns[Tensor]:
        return Columns(*(self._device[begin:end] for begin, end in layout.offsets()[0]))
