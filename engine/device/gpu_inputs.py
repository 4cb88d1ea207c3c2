"""From a StepPlan to the tensors of a forward pass on a GPU, and the block tables there.

Like `inputs`, but nothing waits for the device: an id that only the device knows is named by its
slot, and block tables are kept there and told their new entries.
"""

from __future__ import annotations

import sys
from array import array
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
        most = Layout(most_tokens, rows, most_tiles, most_items, rows + SPARE_ITEMS)
        # Every slot may be entered in one step, by requests whose prompts are cached.
        self._staging = Staging(most, max_changes=rows * limits.max_blocks, depth=depth, device=device)
        self._tables = torch.zeros(rows, limits.max_blocks, dtype=torch.int32, device=device)
        self._cells = self._tables.view(-1)
        self._decode_layouts_by_rows = [
            next((layout for layout in self.decode_layouts if layout.num_tokens >= count), None)
            for count in range(rows + 1)
        ]
        self._range = np.arange(most_tokens)
        self._num_blocks = [0] * rows
        self._unknown = [(-1 - slot).to_bytes(4, sys.byteorder, signed=True) for slot in range(rows)]
        self._arrivals = torch.zeros(most_tokens * limits.num_heads, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(rows, dtype=torch.int32, device=device)

    def prepare(self, plan: StepPlan) -> Prepared:
        """Send the plan's numbers.

        A prompt's first token waits for this, and what numpy and torch touch is cold by then: some 10 us a call.
        """
        entries = plan.entries
        num_rows, lengths = len(entries), [entry.count for entry in entries]
        sampled = [entry.sample for entry in entries]
        num_tokens, num_sampled = sum(lengths), sum(sampled)
        lists = [[entry.slot for entry in entries], [entry.start for entry in entries], lengths]
        slots, starts, counts = np.array(lists, np.int64)
        all_single = num_tokens == num_rows
        chunks = _Chunks(self._range[:num_rows] if all_single else counts.cumsum() - counts, counts, starts + counts)
        num_single = num_rows if all_single else int((counts > 1).argmax())
        chosen = slice(None) if num_sampled == num_rows else np.array(sampled, np.bool_)
        index, places = chunks.begins[chosen] + (counts[chosen] - 1), chunks.ends[chosen]
        layout = self._graph_layout(lengths, num_tokens, num_sampled)
        in_graph = layout is not None
        tiles, items, last_items = _NO_TILES, _NO_ITEMS, _NO_ITEMS
        if layout is None:
            tiles, items = self._divide(chunks.after(num_single))
            first = sum(sampled[:num_single])
            last_items = self._last_items(index[first:], places[first:])
            layout = Layout(num_tokens, num_sampled, len(tiles), len(items), len(last_items))
        elif layout.num_items:
            items = self._items(chunks, layout.num_items)
        columns = self._staging.host(layout)
        columns.ids[:num_tokens] = self._token_ids(entries)
        if all_single:
            columns.positions[:num_tokens], columns.seq_index[:num_tokens] = starts, slots
        else:
            columns.positions[:num_tokens] = self._range[:num_tokens] + np.repeat(starts - chunks.begins, counts)
            columns.seq_index[:num_tokens] = np.repeat(slots, counts)
        if tiles.size:
            columns.tiles[:] = tiles.ravel()
        if items.size:
            columns.items[: items.size] = items.ravel()
        if last_items.size:
            columns.last_items[:] = last_items.ravel()
        rows = slots[chosen]
        columns.index[:num_sampled], columns.places[:num_sampled] = index, places
        columns.slots[:num_sampled] = rows
        self._fill_rows(columns, rows)
        if in_graph:
            _pad(columns, layout, num_tokens, num_sampled, items.size)
        self._send(plan, layout)
        longest = 1 if in_graph else int(chunks.ends[:num_single].max(initial=1))  # a graph's is fixed
        return Prepared(layout, in_graph, num_single, longest, rows, places)

    def batch(self, prepared: Prepared) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors of a step that runs without a graph, to be pruned."""
        columns = self._staging.device(prepared.layout)
        single, longest = prepared.num_single, prepared.longest
        attention = self._attention(columns, columns.tiles, columns.items, single, longest)
        pruned = self._attention(columns, columns.tiles[:0], columns.last_items, single, longest)
        return ForwardBatch(columns.ids, None, attention, columns.index, self.last_ids, pruned), columns

    def graph_batch(self, layout: Layout) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors that every step in a graph's layout reads."""
        columns = self._staging.device(layout)
        decodes = layout.num_items == 0
        longest = self._limits.max_blocks * self._limits.block_size
        attention = self._attention(columns, columns.tiles, columns.items, layout.num_tokens if decodes else 0, longest)
        return ForwardBatch(columns.ids, None, attention, None if decodes else columns.index, self.last_ids), columns

    def _graph_layout(self, lengths: list[int], num_tokens: int, num_sampled: int) -> Layout | None:
        """That of the smallest graph for chunks of such lengths, if there is one."""
        if num_sampled == num_tokens:
            return self._decode_layouts_by_rows[num_tokens]
        layouts = [x for x in self.chunk_layouts if x.num_tokens >= num_tokens and x.num_sampled >= num_sampled]
        if not layouts:
            return None
        num_items = self._limits.short.count(lengths)
        return next((layout for layout in layouts if layout.num_items >= num_items), None)

    def _divide(self, chunks: _Chunks) -> tuple[Tiles, Tiles]:
        """Tiles of long chunks, and items of short ones."""
        short = chunks.counts <= _SHORT_TILES * self._limits.short.tokens
        briefs = chunks.where(short)
        most = self._limits.short.count(briefs.counts.tolist()) + SPARE_ITEMS
        return _tiles(chunks.where(~short), self._limits.query_tile), self._items(briefs, most)

    def _last_items(self, index: Tiles, places: Tiles) -> Tiles:
        """Items of the rows `index` alone, for the last layer."""
        return self._items(_Chunks(index, np.ones_like(index), places), len(index) + SPARE_ITEMS)

    def _items(self, chunks: _Chunks, most: int) -> Tiles:
        return self._limits.short.items(chunks.begins, chunks.counts, chunks.ends, most) if most else _NO_ITEMS

    def _attention(
        self, columns: Columns[Tensor], tiles: Tensor, items: Tensor, num_single: int, longest: int
    ) -> kernels.AttentionBatch:
        divided = tiles.view(-1, 2), items.view(-1, ITEM_COLUMNS)
        schedule = kernels.TileSchedule(num_single, *divided, -(-longest // SPLIT), self._arrivals)
        return kernels.AttentionBatch(self._tables, columns.seq_index, columns.positions, schedule)

    def _send(self, plan: StepPlan, layout: Layout) -> None:
        """Begin the copy, and write the entries' new blocks into the tables on the device."""
        for state in plan.entered:
            self._num_blocks[state.slot] = 0
        grown = [entry for entry in plan.entries if entry.new_blocks]
        num_new = sum([len(entry.new_blocks) for entry in grown])
        if not num_new:
            self._staging.send(layout)
            return
        changes, at = self._staging.host_changes(num_new), 0
        for entry in grown:
            have, count = self._num_blocks[entry.slot], len(entry.new_blocks)
            begin = entry.slot * self._limits.max_blocks + have
            changes.cells[at : at + count] = np.arange(begin, begin + count)
            changes.values[at : at + count] = entry.new_blocks
            self._num_blocks[entry.slot] = have + count
            at += count
        self._staging.send(layout, num_new)
        sent = self._staging.device_changes(num_new)
        self._cells.index_copy_(0, sent.cells, sent.values)

    def _token_ids(self, entries: tuple[PlanEntry, ...]) -> Ints:
        """Ids of all tokens; -1 - slot where it is the one that the step before samples for the slot."""
        parts: list[array[int] | bytes] = []
        for entry in entries:
            if known := entry.ids:
                parts.append(known)
            if len(known) < entry.count:
                parts.append(self._unknown[entry.slot])
        return np.frombuffer(b"".join(parts), np.int32)


def _pad(columns: Columns[Ints], layout: Layout, num_tokens: int, num_sampled: int, items_end: int) -> None:
    """What the rows of a graph that a step does not need hold: tokens, slots and items that nothing is done for."""
    if num_tokens < layout.num_tokens:
        columns.ids[num_tokens:] = 0
        columns.positions[num_tokens:] = -1
        columns.seq_index[num_tokens:] = 0
    if num_sampled < layout.num_sampled:
        columns.index[num_sampled:] = 0
        columns.slots[num_sampled:] = -1
        columns.temperature[num_sampled:] = 0
    if layout.num_items:
        columns.items[items_end:] = 0


def _tiles(chunks: _Chunks, query_tile: int) -> Tiles:
    """(first row, rows) of the tiles of chunks, later tiles first: they have the most keys."""
    tiles = [
        (begin + first, min(query_tile, count - first))
        for begin, count in zip(chunks.begins.tolist(), chunks.counts.tolist(), strict=True)
        for first in range(0, count, query_tile)
    ]
    return np.array(tiles[::-1], np.int64).reshape(-1, 2)
