"""The one copy that takes a step's numbers to the GPU: columns of int32 in one buffer.

A layout depends on four counts only, so that a CUDA graph captured for some number of rows finds
its columns at the same addresses in every step. In front of them is what changes in tables that stay
on the device, as much as a step has of it.
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
    """How many tokens, sampled rows, tiles of long chunks, items of short ones, and items of sampled rows (for the last
    layer) a step has, padding included."""

    num_tokens: int
    num_sampled: int
    num_tiles: int = 0
    num_items: int = 0
    num_last_items: int = 0

    @lru_cache(256)  # noqa: B019 - of a value, of which a runner sees few
    def offsets(self) -> tuple[list[tuple[int, int]], int]:
        """(begin, end) of each column in the order of `Columns`, and the size of all."""
        tokens, rows = self.num_tokens, self.num_sampled
        items, last_items = ITEM_COLUMNS * self.num_items, ITEM_COLUMNS * self.num_last_items
        sizes = (2 * rows, *(tokens,) * 3, *(rows,) * 7, 2 * self.num_tiles, items, last_items)
        spans, end = [], 0
        for size in sizes:
            spans.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return spans, end


@dataclass(frozen=True, slots=True, eq=False)
class Columns(Generic[Array]):
    """Slices of a buffer, all int32. Three hold float32 bits (`temperature`, `top_p`, `min_p`), `seeds`
    [2 * num_sampled] int64; `tiles` is [2 * num_tiles], `items` [5 * num_items], `last_items` [5 * num_last_items].
    `index` are the rows of sampled tokens, `places` their indexes in their sequences.
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
    last_items: Array


@dataclass(frozen=True, slots=True, eq=False)
class Changes(Generic[Array]):
    """New values of cells of a table: `cells` int64 and `values` int32, one each."""

    cells: Array
    values: Array


#: Elements of the buffer that a change takes, and how many changes there are room for at least.
_CHANGE, _LEAST_CHANGES = 3, 64


class Staging:
    """Pinned buffers, one for each step in flight, and the one on the device that they are copied to.

    Changes end where columns begin, so that one copy takes both; it takes a power of two of each, so that the views
    of buffers are few and are made once: each costs 2 us, and 10 after a wait.
    """

    def __init__(self, capacity: Layout, *, max_changes: int = 0, depth: int, device: torch.device) -> None:
        self._first = _CHANGE * _num_sent(max_changes)  # of the columns
        size = self._first + capacity.offsets()[1]
        pin = device.type == "cuda"  # a CPU stands in for a GPU in tests
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(depth)]
        self._arrays: list[Ints] = [buffer.numpy() for buffer in self._pinned]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0
        self._host_columns = lru_cache(128)(self._slice_host)
        self._host_changes = lru_cache(64)(self._slice_host_changes)
        self._device_changes = lru_cache(32)(self._slice_device_changes)
        self._copies = lru_cache(512)(self._slice_copy)

    def host(self, layout: Layout) -> Columns[Ints]:
        """Columns to fill for the next step. The step that used the buffer before must have been collected."""
        self._turn = (self._turn + 1) % len(self._pinned)
        return self._host_columns(self._turn, layout)

    def host_changes(self, num_changes: int) -> Changes[Ints]:
        """As many to fill beside the columns that `host` handed out, or more."""
        return self._host_changes(self._turn, _num_sent(num_changes))

    def send(self, layout: Layout, num_changes: int = 0) -> None:
        """Begin the copy of what `host` and `host_changes` handed out."""
        if num_changes:
            changes = self.host_changes(num_changes)
            changes.cells[num_changes:] = changes.cells[num_changes - 1]  # made again, to no effect
            changes.values[num_changes:] = changes.values[num_changes - 1]
        size = 1 << (layout.offsets()[1] - 1).bit_length()
        device, pinned = self._copies(self._turn, _num_sent(num_changes), size)
        device.copy_(pinned, non_blocking=True)

    def device(self, layout: Layout) -> Columns[Tensor]:
        return Columns(*(self._device[self._first + begin : self._first + end] for begin, end in layout.offsets()[0]))

    def device_changes(self, num_changes: int) -> Changes[Tensor]:
        """What `send` took along: that many, the last one several times."""
        return self._device_changes(_num_sent(num_changes))

    def _slice_host(self, turn: int, layout: Layout) -> Columns[Ints]:
        array = self._arrays[turn][self._first :]
        return Columns(*(array[begin:end] for begin, end in layout.offsets()[0]))

    def _slice_host_changes(self, turn: int, num_sent: int) -> Changes[Ints]:
        array = self._arrays[turn][self._first - _CHANGE * num_sent : self._first]
        return Changes(array[: 2 * num_sent].view(np.int64), array[2 * num_sent :])

    def _slice_device_changes(self, num_sent: int) -> Changes[Tensor]:
        part = self._device[self._first - _CHANGE * num_sent : self._first]
        return Changes(part[: 2 * num_sent].view(torch.int64), part[2 * num_sent :])

    def _slice_copy(self, turn: int, num_sent: int, size: int) -> tuple[Tensor, Tensor]:
        span = slice(self._first - _CHANGE * num_sent, self._first + size)
        return self._device[span], self._pinned[turn][span]


def _num_sent(num_changes: int) -> int:
    """How many changes are sent for so many."""
    return max(_LEAST_CHANGES, 1 << (num_changes - 1).bit_length()) if num_changes else 0
