"""From a StepPlan to the tensors of a forward pass on a GPU, and the block tables there.

Like `inputs`, but nothing waits for the device: an id that only the device knows is named by its
slot, and block tables are kept there: a step's first kernel writes what is new.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

import kernels
from engine.device.graphs import SPARE_ITEMS, chunk_layouts, decode_layouts
from engine.device.staging import Columns, Ints, Layout, Staging
from engine.layers.attention import ForwardBatch
from engine.plan import PlanEntry, StepPlan
from kernels.attention import SPLIT
from kernels.short_chunks import ITEM_COLUMNS, Chunk

#: Chunks of at most so many tiles of short ones are such.
_SHORT_TILES = 2

#: Columns of a tile: first row, rows.
TILE_COLUMNS = 2

_NONE = array("i")


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
    """A step on its way, in the layout of a graph (`in_graph`) or in one of its own. `slots` and `places` are those of
    the tokens to sample.
    """

    layout: Layout
    in_graph: bool
    num_single: int
    longest: int
    slots: list[int]
    places: list[int]


@dataclass(frozen=True, slots=True)
class _Divided:
    """How a step's attention is divided among programs: the columns of these names."""

    tiles: array[int]
    items: array[int]
    last_items: array[int]

    def layout(self, num_tokens: int, num_sampled: int) -> Layout:
        """That of a step which is so divided, without padding."""
        num_items, num_last_items = (len(items) // ITEM_COLUMNS for items in (self.items, self.last_items))
        return Layout(num_tokens, num_sampled, len(self.tiles) // TILE_COLUMNS, num_items, num_last_items)


_UNDIVIDED = _Divided(_NONE, _NONE, _NONE)


class GpuInputs:
    """`fill_rows(columns, slots)` writes the sampling parameters of slots to the columns for them."""

    def __init__(
        self,
        limits: GpuLimits,
        *,
        depth: int,
        device: torch.device,
        fill_rows: Callable[[Columns[Ints], list[int]], None],
    ) -> None:
        self._limits = limits
        self._fill_rows = fill_rows
        rows = limits.max_num_seqs
        most_tokens = max(limits.max_num_tokens, rows)
        self.decode_layouts = decode_layouts(rows)
        self.chunk_layouts = chunk_layouts(rows, limits.max_num_tokens, limits.short.tokens, limits.query_tile)
        most_tiles = limits.max_num_tokens // limits.query_tile + rows
        most_items = limits.max_num_tokens // limits.short.tokens + rows + SPARE_ITEMS
        most = Layout(most_tokens, rows, most_tiles, most_items, rows + SPARE_ITEMS, rows)
        # Every slot may be entered in one step, by requests whose prompts are cached.
        self._staging = Staging(most, max_changes=rows * limits.max_blocks, depth=depth, device=device)
        self._tables = torch.zeros(rows, limits.max_blocks, dtype=torch.int32, device=device)
        self._cells = self._tables.view(-1)
        self._decode_layouts_by_rows = [
            next((layout for layout in self.decode_layouts if layout.num_tokens >= count), None)
            for count in range(rows + 1)
        ]
        self._range = memoryview(array("i", range(limits.max_blocks * limits.block_size)))
        padded = max([rows, *[layout.offsets()[1] for layout in self.chunk_layouts]])  # no column is longer
        self._zeros, self._ones_below = (memoryview(array("i", [number]) * padded) for number in (0, -1))
        self._most_brief = _SHORT_TILES * limits.short.tokens
        self._num_blocks = [0] * rows
        self._unknown = [(-1 - slot).to_bytes(4, sys.byteorder, signed=True) for slot in range(rows)]
        self._arrivals = torch.zeros(most_tokens * limits.num_heads, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(rows, dtype=torch.int32, device=device)

    def prepare(self, plan: StepPlan) -> Prepared:
        """Send the plan's numbers.

        A prompt's first token waits for this. What numpy touches is cold by then, some 5 us a call, so that lists and
        memory views, whose code always runs, are faster for few rows, and as fast for hundreds.
        """
        entries = plan.entries
        lengths = [entry.count for entry in entries]
        ends = list(accumulate(lengths))  # the rows after each
        index = [end - 1 for entry, end in zip(entries, ends, strict=True) if entry.sample]
        slots = [entry.slot for entry in entries if entry.sample]
        places = [entry.start + entry.count for entry in entries if entry.sample]
        num_rows, num_tokens, num_sampled = len(entries), ends[-1], len(index)
        all_single = num_tokens == num_rows
        num_single = num_rows if all_single else next(row for row, length in enumerate(lengths) if length > 1)
        layout = self._graph_layout(lengths, num_single, num_tokens, num_sampled)
        in_graph = layout is not None
        divided, longest = _UNDIVIDED, 1  # a graph's longest is fixed
        if layout is None or layout.has_chunks:
            chunks = _chunks(entries, ends)
            apart = num_single if layout is None or layout.num_single else 0  # else single tokens are items
            lasts = [(row, 1, place) for row, place in zip(index, places, strict=True) if row >= apart]
            divided = self._divide(chunks[apart:], lasts, layout)
            longest = max([end for _, _, end in chunks[:apart]], default=1)
        if layout is None:
            layout = divided.layout(num_tokens, num_sampled)
        columns = self._staging.host(layout)
        self._fill_tokens(columns, entries, num_single)
        columns.index[:num_sampled], columns.places[:num_sampled] = array("i", index), array("i", places)
        columns.slots[:num_sampled] = array("i", slots)
        self._fill_rows(columns, slots)
        self._fill_divided(columns, divided)
        if layout.num_single:
            self._fill_apart(columns, num_single, num_tokens)
        if in_graph:
            self._pad(columns, layout, num_tokens, num_sampled)
        self._staging.send(layout, self._change_tables(plan, columns))
        return Prepared(layout, in_graph, num_single, longest, slots, places)

    def batch(self, prepared: Prepared) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors of a step that runs without a graph, to be pruned."""
        columns = self._staging.device(prepared.layout)
        single, longest = prepared.num_single, prepared.longest
        attention = self._attention(columns, columns.tiles, columns.items, single, longest)
        pruned = self._attention(columns, columns.tiles[:0], columns.last_items, single, longest)
        return ForwardBatch(columns.ids, None, attention, columns.index, self._start(columns), pruned), columns

    def graph_batch(self, layout: Layout) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors that every step in a graph's layout reads, to be pruned if it has tiles of long chunks."""
        columns = self._staging.device(layout)
        longest = self._limits.max_blocks * self._limits.block_size
        single = layout.num_single if layout.has_chunks else layout.num_tokens
        attention = self._attention(columns, columns.tiles, columns.items, single, longest)
        pruned = None
        if layout.num_last_items:
            pruned = self._attention(columns, columns.tiles[:0], columns.last_items, single, longest)
        sampled = columns.index if layout.has_chunks else None
        return ForwardBatch(columns.ids, None, attention, sampled, self._start(columns), pruned), columns

    def graph_columns(self, layout: Layout) -> Columns[Tensor]:
        """Those of `graph_batch`, without making the rest."""
        return self._staging.device(layout)

    def _start(self, columns: Columns[Tensor]) -> kernels.StepStart:
        return kernels.StepStart(self.last_ids, self._cells, columns.num_changes, columns.changes)

    def _graph_layout(self, lengths: list[int], num_single: int, num_tokens: int, num_sampled: int) -> Layout | None:
        """That of the first graph which has room for chunks of such lengths, the first `num_single` single tokens, if
        there is one."""
        if num_sampled == num_tokens:
            return self._decode_layouts_by_rows[num_tokens]
        chunks, size, count = lengths[num_single:], self._limits.query_tile, self._limits.short.count
        num_tiles = sum([-(-length // size) for length in chunks if length > self._most_brief])
        num_items = count([length for length in chunks if length <= self._most_brief])
        num_items_of_all = count(lengths)

        def has_room(layout: Layout) -> bool:
            if layout.num_tokens < num_tokens or layout.num_sampled < num_sampled:
                return False
            if not layout.num_tiles:
                return num_items_of_all <= layout.num_items
            if num_tiles > layout.num_tiles or num_items > layout.num_items:
                return False
            if not layout.num_single:
                return not num_single
            # Of a kernel none of whose rows are there no program waits for the kernel before, which the next relies on.
            return 0 < num_single <= layout.num_single and 0 < len(chunks) <= layout.num_last_items

        return next(filter(has_room, self.chunk_layouts), None)

    def _divide(self, chunks: Sequence[Chunk], lasts: Sequence[Chunk], graph: Layout | None) -> _Divided:
        """Tiles of long chunks, later ones first, as they have the most keys; items of short ones; and items of
        `lasts`, the sampled rows. In a graph, as many as it has room for."""
        short, size = self._limits.short, self._limits.query_tile
        if graph is not None and not graph.num_tiles:
            return _Divided(_NONE, short.items(chunks, graph.num_items), _NONE)
        briefs = [chunk for chunk in chunks if chunk[1] <= self._most_brief]
        tiles = [
            (begin + first, min(size, count - first))
            for begin, count, _ in chunks
            if count > self._most_brief
            for first in range(0, count, size)
        ]
        num_items = short.count([count for _, count, _ in briefs]) + SPARE_ITEMS if graph is None else graph.num_items
        num_last_items = len(lasts) + SPARE_ITEMS if graph is None else graph.num_last_items
        return _Divided(
            array("i", chain.from_iterable(reversed(tiles))),
            short.items(briefs, num_items),
            short.items(lasts, num_last_items),
        )

    def _attention(
        self, columns: Columns[Tensor], tiles: Tensor, items: Tensor, num_single: int, longest: int
    ) -> kernels.AttentionBatch:
        divided = tiles.view(-1, TILE_COLUMNS), items.view(-1, ITEM_COLUMNS)
        apart = (columns.single_positions, columns.chunk_positions) if len(columns.single_positions) else (None, None)
        schedule = kernels.TileSchedule(num_single, *divided, -(-longest // SPLIT), self._arrivals, *apart)
        return kernels.AttentionBatch(self._tables, columns.seq_index, columns.positions, schedule)

    def _change_tables(self, plan: StepPlan, columns: Columns[Ints]) -> int:
        """Name the cells of the tables that the entries' new blocks go to; how many there are."""
        for state in plan.entered:
            self._num_blocks[state.slot] = 0
        cells: list[int] = []
        blocks: list[int] = []
        for entry in [entry for entry in plan.entries if entry.new_blocks]:
            slot, count = entry.slot, len(entry.new_blocks)
            first = slot * self._limits.max_blocks + self._num_blocks[slot]
            self._num_blocks[slot] += count
            cells += range(first, first + count)
            blocks += entry.new_blocks
        num_changes = columns.num_changes[0] = len(blocks)
        columns.changes[: 2 * num_changes] = array("i", cells + blocks)
        return num_changes

    def _fill_tokens(self, columns: Columns[Ints], entries: Sequence[PlanEntry], num_single: int) -> None:
        """An id is -1 - slot where it is the one that the step before samples for the slot."""
        parts: list[array[int] | bytes] = []
        for entry in entries:
            if known := entry.ids:
                parts.append(known)
            if len(known) < entry.count:
                parts.append(self._unknown[entry.slot])
        ids = memoryview(b"".join(parts)).cast("i")
        columns.ids[: len(ids)] = ids
        columns.positions[:num_single] = array("i", [entry.start for entry in entries[:num_single]])
        columns.seq_index[:num_single] = array("i", [entry.slot for entry in entries[:num_single]])
        begin = num_single
        for entry in entries[num_single:]:
            start, count = entry.start, entry.count
            columns.positions[begin : begin + count] = self._range[start : start + count]
            columns.seq_index[begin : begin + count] = array("i", [entry.slot]) * count
            begin += count

    def _fill_divided(self, columns: Columns[Ints], divided: _Divided) -> None:
        """Behind what a step has come the tiles and items of its graph that nothing is done for."""
        pairs = (
            (columns.tiles, divided.tiles),
            (columns.items, divided.items),
            (columns.last_items, divided.last_items),
        )
        for column, numbers in pairs:
            column[: len(numbers)] = numbers
            if count := len(column) - len(numbers):
                column[len(numbers) :] = self._zeros[:count]

    def _fill_apart(self, columns: Columns[Ints], num_single: int, num_tokens: int) -> None:
        """The positions once more, of single tokens and of chunks, each where rows of the other kind have none."""
        single, of_chunks = columns.single_positions, columns.chunk_positions
        single[:num_single] = columns.positions[:num_single]
        single[num_single:] = self._ones_below[: len(single) - num_single]
        of_chunks[:num_single] = self._ones_below[:num_single]
        of_chunks[num_single:num_tokens] = columns.positions[num_single:num_tokens]
        of_chunks[num_tokens:] = self._ones_below[: len(of_chunks) - num_tokens]

    def _pad(self, columns: Columns[Ints], layout: Layout, num_tokens: int, num_sampled: int) -> None:
        """What rows of a graph hold that a step does not need: tokens and slots that nothing is done for."""
        if count := layout.num_tokens - num_tokens:
            columns.ids[num_tokens:] = columns.seq_index[num_tokens:] = self._zeros[:count]
            columns.positions[num_tokens:] = self._ones_below[:count]
        if count := layout.num_sampled - num_sampled:
            columns.index[num_sampled:] = columns.temperature[num_sampled:] = self._zeros[:count]
            columns.slots[num_sampled:] = self._ones_below[:count]


def _chunks(entries: Sequence[PlanEntry], ends: Sequence[int]) -> list[Chunk]:
    return [
        (end - entry.count, entry.count, entry.start + entry.count) for entry, end in zip(entries, ends, strict=True)
    ]
