"""From a StepPlan to the tensors of a forward pass on a GPU, and the block tables there.

Like `inputs`, but nothing waits for the device: an id that only the device knows is named by its
slot, and block tables are kept there and told their new entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kernels
from engine.device.graphs import SPARE_ITEMS, chunk_layouts, decode_layouts
from engine.device.staging import Columns, Ints, Layout, Staging
from engine.layers.attention import ForwardBatch
from engine.plan import PlanEntry, StepPlan
from kernels.attention import SPLIT
from kernels.short_chunks import ITEM_COLUMNS

#: Chunks of at most so many tiles of short ones are such.
_SHORT_TILES = 2

Tiles = npt.NDArray[np.int64]
_NO_TILES, _NO_ITEMS = np.empty((0, 2), np.int64), np.empty((0, ITEM_COLUMNS), np.int64)


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Sizes that inputs are made for. `query_tile` and `short` are the operators'."""

    max_num_seqs: int
    max_num_tokens: int
    max_blocks: int
    block_size: int
    num_heads: int
    query_tile: int
    short: kernels.ShortTiles


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step on its way, in the layout of a graph (`in_graph`) or in one of its own. `slots` and `places`
    [num_sampled] are those of the tokens to sample.
    """

    layout: Layout
    in_graph: bool
    num_single: int
    longest: int
    slots: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Of some entries: first rows, numbers of tokens, and the positions after the last."""

    begins: Tiles
    counts: Tiles
    ends: Tiles

    def after(self, first: int) -> _Chunks:
        return _Chunks(self.begins[first:], self.counts[first:], self.ends[first:])

    def where(self, chosen: npt.NDArray[np.bool_]) -> _Chunks:
        return _Chunks(self.begins[chosen], self.counts[chosen], self.ends[chosen])


class GpuInputs:
    """`fill_rows(columns, slots)` writes the sampling parameters of slots to the columns for them."""

    def __init__(
        self,
        limits: GpuLimits,
        *,
        depth: int,
        device: torch.device,
        fill_rows: Callable[[Columns[Ints], npt.NDArray[np.int64]], None],
    ) -> None:
        self._limits = limits
        self._fill_rows = fill_rows
        rows = limits.max_num_seqs
        most_tokens = max(limits.max_num_tokens, rows)
        self.decode_layouts = decode_layouts(rows)
        self.chunk_layouts = chunk_layouts(rows, limits.max_num_tokens, limits.short.tokens)
        most_tiles = limits.max_num_tokens // limits.query_tile + rows
        most_items = limits.max_num_tokens // limits.short.tokens + rows + SPARE_ITEMS
        self._staging = Staging(Layout(most_tokens, rows, most_tiles, most_items), depth=depth, device=device)
        self._tables = torch.zeros(limits.max_num_seqs, limits.max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = [0] * limits.max_num_seqs
        self._arrivals = torch.zeros(most_tokens * limits.num_heads, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

    def prepare(self, plan: StepPlan) -> Prepared:
        """Send the plan's numbers."""
        for state in plan.entered:
            self._num_blocks[state.slot] = 0
        entries = plan.entries
        self._send_blocks(entries)
        slots = np.array([entry.slot for entry in entries], np.int64)
        counts = np.array([entry.count for entry in entries], np.int64)
        starts = np.array([entry.start for entry in entries], np.int64)
        sampled = np.array([entry.sample for entry in entries], np.bool_)
        several = counts > 1
        num_single = int(several.argmax()) if several.any() else len(entries)
        ends = np.cumsum(counts)
        num_tokens, num_sampled = int(ends[-1]), int(sampled.sum())
        chunks = _Chunks(ends - counts, counts, starts + counts)
        layout = self._decode_layout(num_tokens) if num_sampled == num_tokens else None
        if layout is None:
            layout = self._chunk_layout(num_tokens, num_sampled, self._limits.short.count(counts))
        in_graph = layout is not None
        if layout is None:
            tiles, items = self._divide(chunks.after(num_single))
            layout = Layout(num_tokens, num_sampled, len(tiles), len(items))
        else:
            tiles, items = _NO_TILES, self._items(chunks, layout.num_items)
        columns = self._staging.host(layout)
        columns.ids[:num_tokens] = _token_ids(entries)
        columns.positions[:num_tokens] = np.arange(num_tokens) + np.repeat(starts - chunks.begins, counts)
        columns.seq_index[:num_tokens] = np.repeat(slots, counts)
        columns.tiles[: tiles.size] = tiles.ravel()
        columns.items[: items.size] = items.ravel()
        rows, places = slots[sampled], chunks.ends[sampled]
        columns.index[:num_sampled] = ends[sampled] - 1
        columns.places[:num_sampled] = places
        columns.slots[:num_sampled] = rows
        self._fill_rows(columns, rows)
        if in_graph:
            _pad(columns, num_tokens, num_sampled, items.size)
        self._staging.send(layout)
        longest = 1 if in_graph else int(chunks.ends[:num_single].max(initial=1))  # a graph's is fixed
        return Prepared(layout, in_graph, num_single, longest, rows, places)

    def batch(self, prepared: Prepared) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors of a step that runs without a graph."""
        columns = self._staging.device(prepared.layout)
        attention = self._attention(columns, prepared.num_single, prepared.longest)
        return ForwardBatch(columns.ids, None, attention, columns.index, self.last_ids), columns

    def graph_batch(self, layout: Layout) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors that every step in a graph's layout reads."""
        columns = self._staging.device(layout)
        decodes = layout.num_items == 0
        longest = self._limits.max_blocks * self._limits.block_size
        attention = self._attention(columns, layout.num_tokens if decodes else 0, longest)
        return ForwardBatch(columns.ids, None, attention, None if decodes else columns.index, self.last_ids), columns

    def _decode_layout(self, num_tokens: int) -> Layout | None:
        return next((layout for layout in self.decode_layouts if layout.num_tokens >= num_tokens), None)

    def _chunk_layout(self, num_tokens: int, num_sampled: int, num_items: int) -> Layout | None:
        return next(
            (
                layout
                for layout in self.chunk_layouts
                if layout.num_tokens >= num_tokens
                and layout.num_sampled >= num_sampled
                and layout.num_items >= num_items
            ),
            None,
        )

    def _divide(self, chunks: _Chunks) -> tuple[Tiles, Tiles]:
        """Tiles of long chunks, and items of short ones."""
        short = chunks.counts <= _SHORT_TILES * self._limits.short.tokens
        briefs = chunks.where(short)
        most = self._limits.short.count(briefs.counts) + SPARE_ITEMS
        return _tiles(chunks.where(~short), self._limits.query_tile), self._items(briefs, most)

    def _items(self, chunks: _Chunks, most: int) -> Tiles:
        return self._limits.short.items(chunks.begins, chunks.counts, chunks.ends, most) if most else _NO_ITEMS

    def _attention(self, columns: Columns[Tensor], num_single: int, longest: int) -> kernels.AttentionBatch:
        tiles, items = columns.tiles.view(-1, 2), columns.items.view(-1, ITEM_COLUMNS)
        schedule = kernels.TileSchedule(num_single, tiles, items, -(-longest // SPLIT), self._arrivals)
        return kernels.AttentionBatch(self._tables, columns.seq_index, columns.positions, schedule)

    def _send_blocks(self, entries: tuple[PlanEntry, ...]) -> None:
        """Write the entries' new blocks into the tables on the device."""
        cells: list[int] = []
        blocks: list[int] = []
        for entry in entries:
            if entry.new_blocks:
                begin = entry.slot * self._limits.max_blocks + self._num_blocks[entry.slot]
                self._num_blocks[entry.slot] += len(entry.new_blocks)
                cells.extend(range(begin, begin + len(entry.new_blocks)))
                blocks.extend(entry.new_blocks)
        if cells:
            sent = torch.from_numpy(np.array([cells, blocks], np.int64))  # torch's own way takes three times as long
            if self._tables.is_cuda:
                sent = sent.pin_memory().to(self._tables.device, non_blocking=True)
            self._tables.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


def _pad(columns: Columns[Ints], num_tokens: int, num_sampled: int, items_end: int) -> None:
    """What the rows of a graph that a step does not need hold: tokens, slots and items that nothing is done for."""
    columns.ids[num_tokens:] = 0
    columns.positions[num_tokens:] = -1
    columns.seq_index[num_tokens:] = 0
    columns.index[num_sampled:] = 0
    columns.slots[num_sampled:] = -1
    columns.temperature[num_sampled:] = 0
    columns.items[items_end:] = 0


def _token_ids(entries: tuple[PlanEntry, ...]) -> Ints:
    """Ids of all tokens; -1 - slot where it is the one that the step before samples for the slot."""
    ids: list[int] = []
    for entry in entries:
        if known := entry.ids:
            ids.extend(known)
        if len(known) < entry.count:
            ids.append(-1 - entry.slot)
    return np.array(ids, np.int32)


def _tiles(chunks: _Chunks, query_tile: int) -> Tiles:
    """(first row, rows) of the tiles of chunks, later tiles first: they have the most keys."""
    tiles = [
        (begin + first, min(query_tile, count - first))
        for begin, count in zip(chunks.begins.tolist(), chunks.counts.tolist(), strict=True)
        for first in range(0, count, query_tile)
    ]
    return np.array(tiles[::-1], np.int64).reshape(-1, 2)
