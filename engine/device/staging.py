"""The one copy that takes a step's numbers to the GPU: columns of int32 in one buffer.

A layout depends on its counts only, so that a CUDA graph captured for some number of rows finds
its columns at the same addresses in every step. What changes in tables that stay on the device comes last,
so that no more of it is copied than a step has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.short_chunks import ITEM_COLUMNS

#: Columns begin at multiples of this many elements: kernels are compiled for pointers aligned to 16 bytes.
_ALIGNMENT = 4

#: Of int32, in pinned memory: code that is always warm fills it, while a call of numpy's takes 5 us after a wait.
Ints = memoryview
Array = TypeVar("Array", Ints, Tensor)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many tokens, sampled rows, tiles of long chunks, items of short ones, and items of sampled rows (for the last
    layer) a step has, padding included. Of a graph for single tokens beside chunks, `num_single` are the most of those.
    """

    num_tokens: int
    num_sampled: int
    num_tiles: int = 0
    num_items: int = 0
    num_last_items: int = 0
    num_single: int = 0

    @property
    def has_chunks(self) -> bool:
        """Whether not all rows are single tokens."""
        return self.num_tiles > 0 or self.num_items > 0

    @lru_cache(256)  # noqa: B019 - of a value; the graphs' are always among the last
    def offsets(self) -> tuple[list[tuple[int, int]], int]:
        """(begin, end) of each column in the order of `Columns`, but for `changes`, and the size of all these."""
        tokens, rows = self.num_tokens, self.num_sampled
        items, last_items = ITEM_COLUMNS * self.num_items, ITEM_COLUMNS * self.num_last_items
        apart = (self.num_single, tokens) if self.num_single else (0, 0)
        sizes = (1, 2 * rows, *(tokens,) * 3, *(rows,) * 7, 2 * self.num_tiles, items, last_items, *apart)
        spans, end = [], 0
        for size in sizes:
            spans.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return spans, end


@dataclass(frozen=True, slots=True, eq=False)
class Columns(Generic[Array]):
    """Slices of a buffer, all int32. `num_changes` and `changes` are as in `kernels.StepStart`. Three hold float32 bits
    (`temperature`, `top_p`, `min_p`), `seeds` [2 * num_sampled] int64; `tiles` is [2 * num_tiles], `items`
    [5 * num_items], `last_items` [5 * num_last_items]. `index` are the rows of sampled tokens, `places` their indexes
    in their sequences. `single_positions` [num_single] and `chunk_positions` [num_tokens] are as in
    `kernels.TileSchedule`, empty where a layout has no `num_single`.
    """

    num_changes: Array
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
    last_items: Array
    single_positions: Array
    chunk_positions: Array
    changes: Array


class Staging:
    """Pinned buffers, one for each step in flight, and the one on the device that they are copied to.

    A power of two of elements is copied, so that the views of buffers are few and are made once: each costs 2 us, and
    10 after a wait.
    """

    def __init__(self, capacity: Layout, *, max_changes: int = 0, depth: int, device: torch.device) -> None:
        self._changes_size = 2 * max_changes
        size = capacity.offsets()[1] + self._changes_size
        pin = device.type == "cuda"  # a CPU stands in for a GPU in tests
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(depth)]
        self._views: list[Ints] = [memoryview(buffer.numpy()) for buffer in self._pinned]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0
        self._host_columns = lru_cache(128)(self._slice_host)
        self._device_columns = lru_cache(128)(self._slice_device)
        self._copies = lru_cache(64)(self._slice_copy)

    def host(self, layout: Layout) -> Columns[Ints]:
        """Columns to fill for the next step. The step that used the buffer before must have been collected."""
        self._turn = (self._turn + 1) % len(self._pinned)
        return self._host_columns(self._turn, layout)

    def send(self, layout: Layout, num_changes: int = 0) -> None:
        """Begin the copy of what `host` handed out."""
        size = layout.offsets()[1] + 2 * num_changes
        device, pinned = self._copies(self._turn, 1 << (size - 1).bit_length())
        device.copy_(pinned, non_blocking=True)

    def device(self, layout: Layout) -> Columns[Tensor]:
        return self._device_columns(layout)

    def _spans(self, layout: Layout) -> list[tuple[int, int]]:
        spans, end = layout.offsets()
        return [*spans, (end, end + self._changes_size)]

    def _slice_host(self, turn: int, layout: Layout) -> Columns[Ints]:
        return Columns(*(self._views[turn][begin:end] for begin, end in self._spans(layout)))

    def _slice_device(self, layout: Layout) -> Columns[Tensor]:
        return Columns(*(self._device[begin:end] for begin, end in self._spans(layout)))

    def _slice_copy(self, turn: int, size: int) -> tuple[Tensor, Tensor]:
        return self._device[:size], self._pinned[turn][:size]
