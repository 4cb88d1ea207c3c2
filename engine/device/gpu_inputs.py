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
from engine.device.staging import Columns, Ints, Layout, Staging
from engine.layers.attention import ForwardBatch
from engine.plan import PlanEntry, StepPlan

#: Positions in a split of the context (`kernels.attention`): what bounds partial results.
_SPLIT = 256


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Sizes that inputs are made for. `query_tile` is the operators'."""

    max_num_seqs: int
    max_num_tokens: int
    max_blocks: int
    block_size: int
    num_kv_heads: int
    query_tile: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step on its way. `decode_rows` > 0: every entry samples from one token, so a graph of that many rows fits."""

    layout: Layout
    num_sampled: int
    num_single: int
    longest: int
    slots: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    decode_rows: int


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
        most_tiles = limits.max_num_tokens // limits.query_tile + limits.max_num_seqs
        rows = limits.max_num_seqs
        self._staging = Staging(Layout(max(limits.max_num_tokens, rows), rows, most_tiles), depth=depth, device=device)
        self._tables = torch.zeros(limits.max_num_seqs, limits.max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = [0] * limits.max_num_seqs
        self._arrivals = torch.zeros(limits.max_num_seqs * limits.num_kv_heads, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

    def prepare(self, plan: StepPlan, round_up: Callable[[int], int]) -> Prepared:
        """Send the plan's numbers. `round_up` answers the rows of the graph for a number of decodes, 0 without one."""
        for state in plan.entered:
            self._num_blocks[state.slot] = 0
        entries = plan.entries
        self._send_blocks(entries)
        slots = np.fromiter((entry.slot for entry in entries), np.int64, len(entries))
        counts = np.fromiter((entry.count for entry in entries), np.int64, len(entries))
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        sampled = np.fromiter((entry.sample for entry in entries), np.bool_, len(entries))
        decode_rows = round_up(len(entries)) if bool((counts == 1).all() and sampled.all()) else 0
        several = counts > 1
        num_single = int(several.argmax()) if several.any() else len(entries)
        ends = np.cumsum(counts)
        tiles = _tiles(ends - counts, counts, num_single, self._limits.query_tile)
        num_tokens = int(ends[-1])
        layout = Layout(decode_rows or num_tokens, decode_rows or int(sampled.sum()), len(tiles))
        columns = self._staging.host(layout)
        columns.ids[:num_tokens] = _token_ids(entries)
        columns.positions[:num_tokens] = np.arange(num_tokens) + np.repeat(starts - (ends - counts), counts)
        columns.seq_index[:num_tokens] = np.repeat(slots, counts)
        columns.tiles[:] = tiles.ravel()
        rows = slots[sampled]
        columns.index[: len(rows)] = ends[sampled] - 1
        columns.places[: len(rows)] = places = (starts + counts)[sampled]
        columns.slots[: len(rows)] = rows
        self._fill_rows(columns, rows)
        if decode_rows:
            columns.ids[num_tokens:] = 0
            columns.positions[num_tokens:] = -1
            columns.seq_index[num_tokens:] = 0
            columns.slots[num_tokens:] = -1
            columns.temperature[num_tokens:] = 0
        self._staging.send(layout)
        longest = int((starts + counts)[:num_single].max(initial=1))
        return Prepared(layout, len(rows), num_single, longest, rows, places, decode_rows)

    def batch(self, prepared: Prepared) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors of a step that runs without a graph."""
        columns = self._staging.device(prepared.layout)
        tiles = columns.tiles.view(-1, 2)
        attention = self._attention(columns, prepared.num_single, prepared.longest, tiles)
        sampled = columns.index
        return ForwardBatch(columns.ids, None, attention, sampled, self.last_ids), columns

    def graph_batch(self, num_rows: int) -> tuple[ForwardBatch, Columns[Tensor]]:
        """The tensors that every decode of `num_rows` rows, padding included, reads."""
        columns = self._staging.device(Layout(num_rows, num_rows, 0))
        longest = self._limits.max_blocks * self._limits.block_size
        attention = self._attention(columns, num_rows, longest, columns.tiles.view(-1, 2))
        return ForwardBatch(columns.ids, None, attention, None, self.last_ids), columns

    def _attention(
        self, columns: Columns[Tensor], num_single: int, longest: int, tiles: Tensor
    ) -> kernels.AttentionBatch:
        schedule = kernels.TileSchedule(num_single, tiles, -(-longest // _SPLIT), self._arrivals)
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
            sent = torch.tensor([cells, blocks], dtype=torch.int64, pin_memory=True)
            sent = sent.to(self._tables.device, non_blocking=True)
            self._tables.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


def _token_ids(entries: tuple[PlanEntry, ...]) -> Ints:
    """Ids of all tokens; -1 - slot where it is the one that the step before samples for the slot."""
    ids: list[int] = []
    for entry in entries:
        ids.extend(entry.ids)
        if len(entry.ids) < entry.count:
            ids.append(-1 - entry.slot)
    return np.array(ids, np.int32)


def _tiles(
    begins: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], num_single: int, query_tile: int
) -> npt.NDArray[np.int64]:
    """(first row, rows) of the tiles of chunks, later tiles first: they have the most keys."""
    tiles = [
        (begin + first, min(query_tile, count - first))
        for begin, count in zip(begins[num_single:].tolist(), counts[num_single:].tolist(), strict=True)
        for first in range(0, count, query_tile)
    ]
    return np.array(tiles[::-1], np.int64).reshape(-1, 2)
