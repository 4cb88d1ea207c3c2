"""What kernels are called with: beginnings of steps, and batches of attention, laid out for a CPU and for a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels
from kernels.gpu import attention
from kernels.short_chunks import ITEM_COLUMNS


def step_start(last_ids: Tensor, num_changes: int) -> kernels.StepStart:
    """With so many changes of cells that they leave some between them; behind them is what nobody should read."""
    cells = torch.arange(2 * num_changes + 5, dtype=torch.int32)
    indexes = torch.randperm(len(cells))[:num_changes].int()
    changes = torch.cat((indexes, 10_000 + indexes, torch.full((7,), 2**30, dtype=torch.int32)))
    count = torch.tensor([num_changes], dtype=torch.int32)
    return kernels.StepStart(last_ids, *(column.to(last_ids.device) for column in (cells, count, changes)))


def changed(start: kernels.StepStart) -> Tensor:
    """The cells as they will be."""
    count, cells = int(start.num_changes), start.cells.clone()
    cells[start.changes[:count].long()] = start.changes[count : 2 * count]
    return cells


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCase:
    """Sequences whose context lies in the pool already, and the fused projection of their next tokens."""

    num_heads: int
    qkv: Tensor
    table: Tensor
    keys: Tensor
    values: Tensor
    batch: kernels.AttentionBatch
    slots: Tensor
    norms: kernels.HeadNorms | None = None
    scales: kernels.KVScales = kernels.UNSCALED

    @classmethod
    def draw(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        block_size: int,
        starts: tuple[int, ...],
        counts: tuple[int, ...],
    ) -> AttentionCase:
        generator = torch.Generator().manual_seed(3)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        max_blocks = -(-max(ends) // block_size)
        num_blocks = len(counts) * max_blocks + 3
        tables = torch.randperm(num_blocks, generator=generator)[: len(counts) * max_blocks]
        tables = tables.view(len(counts), max_blocks).int()
        shapes = kernels.kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        seq_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        qkv = torch.randn(len(positions), (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
        angles = torch.outer(torch.arange(1000.0), 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim))
        slots = tables.long()[seq_index, positions // block_size] * block_size + positions % block_size
        num_single = next((place for place, count in enumerate(counts) if count > 1), len(counts))
        size = kernels.query_tile(num_heads, num_kv_heads, head_dim, dtype)
        tiles, row = [], num_single
        for count in counts[num_single:]:
            tiles += [(row + first, min(size, count - first)) for first in range(0, count, size)]
            row += count
        schedule = kernels.TileSchedule(
            num_single,
            torch.tensor(tiles, dtype=torch.int32).view(-1, 2),
            torch.zeros(0, ITEM_COLUMNS, dtype=torch.int32),
            -(-max(ends) // 256),
            torch.zeros(len(positions) * num_heads, dtype=torch.int32),
        )
        batch = kernels.AttentionBatch(tables, seq_index.int(), positions.int(), schedule)
        return cls(num_heads, qkv, torch.cat((angles.cos(), angles.sin()), 1), keys, values, batch, slots)

    def with_fp8(self, scales: kernels.KVScales) -> AttentionCase:
        """The same with the pool in FP8."""
        limit = torch.finfo(kernels.FP8).max
        keys, values = (
            (pool.float() / scale).clamp(-limit, limit).to(kernels.FP8)
            for pool, scale in ((self.keys, scales.key), (self.values, scales.value))
        )
        return replace(self, keys=keys, values=values, scales=scales)

    def in_items(self, spare: int) -> AttentionCase:
        """The same with short tiles alone, `spare` more programs to share their contexts, and one item of padding."""
        batch, schedule = self.batch, self.batch.schedule
        assert schedule is not None
        chunks = schedule.tiles.tolist()
        heads, kv_heads, head_dim = self.num_heads, self.values.shape[1], self.values.shape[3]
        tiles = kernels.short_tiles(heads, kv_heads, head_dim, self.qkv.dtype)
        placed = [(first, count, int(batch.positions[first + count - 1]) + 1) for first, count in chunks]
        items = tiles.items(placed, tiles.count([count for _, count in chunks]) + spare)
        padded = torch.tensor([*items, *[0] * ITEM_COLUMNS], dtype=torch.int32, device=schedule.tiles.device)
        padded = padded.view(-1, ITEM_COLUMNS)
        return replace(self, batch=replace(batch, schedule=replace(schedule, tiles=schedule.tiles[:0], items=padded)))

    def padded(self, num_tiles: int, num_items: int) -> AttentionCase:
        """The same with so many tiles and items that nothing is done for, behind its own."""
        schedule = self.batch.schedule
        assert schedule is not None
        tiles, items = (
            torch.cat((rows, rows.new_zeros(count, rows.shape[1])))
            for rows, count in ((schedule.tiles, num_tiles), (schedule.items, num_items))
        )
        return replace(self, batch=replace(self.batch, schedule=replace(schedule, tiles=tiles, items=items)))

    def with_room(self, num_single: int) -> AttentionCase:
        """The same as in a graph that has room for so many single tokens."""
        batch, schedule = self.batch, self.batch.schedule
        assert schedule is not None
        positions = batch.positions
        is_single = torch.arange(len(positions), device=positions.device) < schedule.num_single
        apart = (positions.masked_fill(~is_single, -1)[:num_single], positions.masked_fill(is_single, -1))
        room = replace(schedule, num_single=num_single, single_positions=apart[0], chunk_positions=apart[1])
        return replace(self, batch=replace(batch, schedule=room))

    def of_last_tokens(self, spare: int) -> tuple[AttentionCase, Tensor]:
        """The same where chunks' last tokens alone attend, as short tiles; and the rows that do."""
        schedule = self.batch.schedule
        assert schedule is not None
        seq_index = self.batch.seq_index.cpu()
        last = torch.cat((seq_index[1:] != seq_index[:-1], torch.ones(1, dtype=torch.bool)))
        rows = last.nonzero().flatten()
        tiles = torch.stack((rows, torch.ones_like(rows)), 1)[schedule.num_single :].int().to(schedule.tiles.device)
        part = replace(self, batch=replace(self.batch, schedule=replace(schedule, tiles=tiles)))
        return part.in_items(spare), rows.to(self.qkv.device)

    def on(self, device: torch.device) -> AttentionCase:
        """The same with the pool as a GPU has it."""
        batch, schedule = self.batch, self.batch.schedule
        assert schedule is not None
        schedule = replace(
            schedule,
            tiles=schedule.tiles.to(device),
            items=schedule.items.to(device),
            arrivals=schedule.arrivals.to(device),
        )
        return replace(
            self,
            qkv=self.qkv.to(device),
            table=self.table.to(device),
            keys=self.keys.transpose(2, 3).contiguous().to(device).transpose(2, 3),
            values=self.values.clone().to(device),
            batch=kernels.AttentionBatch(
                batch.block_tables.to(device), batch.seq_index.to(device), batch.positions.to(device), schedule
            ),
        )

    def run(self, window: int, soft_cap: float) -> Tensor:
        """The GPU operator on a copy of the projection; the pool is written."""
        return attention.rotate_and_attend(
            *(self.qkv.clone(), self.table, self.keys, self.values, self.batch),
            num_heads=self.num_heads,
            scale=self.values.shape[3] ** -0.5,
            window=window,
            soft_cap=soft_cap,
            norms=self.norms,
            scales=self.scales,
            tile=64,
            split=256,
        )

    def _rows(self, begin: int, end: int, num_single: int) -> Tensor:
        """Rows of the one sequence, computed as one chunk or as single tokens."""
        batch, schedule = self.batch, self.batch.schedule
        assert schedule is not None
        heads, kv_heads, head_dim = self.num_heads, self.values.shape[1], self.values.shape[3]
        size = kernels.query_tile(heads, kv_heads, head_dim, self.qkv.dtype)
        tiles = [(first, min(size, end - begin - first)) for first in range(num_single, end - begin, size)]
        device = self.qkv.device
        part = kernels.AttentionBatch(
            batch.block_tables,
            batch.seq_index[begin:end].contiguous(),
            batch.positions[begin:end].contiguous(),
            kernels.TileSchedule(
                num_single,
                torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 2),
                schedule.items[:0],
                schedule.max_splits,
                torch.zeros(64, dtype=torch.int32, device=device),
            ),
        )
        return replace(self, qkv=self.qkv[begin:end], batch=part).run(0, 0.0)

    def in_chunks(self, cuts: tuple[int, ...]) -> Tensor:
        return torch.cat([self._rows(begin, end, 0) for begin, end in itertools.pairwise(cuts)])

    def row_alone(self, row: int) -> Tensor:
        return self._rows(row, row + 1, 1)
