"""Attention of a mixed batch: rows that are alone of their sequence, then short chunks, then tiles of long ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention import SPLIT
from kernels.gpu.decode import attend_rows, scratch_bytes
from kernels.gpu.launch import limits
from kernels.gpu.prefill import attend_tiles
from kernels.gpu.rope import rope_write_
from kernels.gpu.short import attend_short
from kernels.short_chunks import PARTS_BYTES

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch, HeadNorms, TileSchedule
    from kernels.kv_cache import KVScales


def rotate_and_attend(
    qkv: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    num_heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    norms: HeadNorms | None,
    scales: KVScales,
    tile: int,
    split: int,
) -> Tensor:
    """From the fused projection qkv [M, (HQ + 2 * HKV) * D], which is overwritten, to [M, HQ, D].

    `table` float32 [num_positions, rotary_dim]. Keys [num_blocks, HKV, D, block_size] lie with D
    innermost, values [num_blocks, HKV, block_size, D], both in qkv's dtype or FP8 with
    `scales`.
    """
    num_rows, schedule = qkv.shape[0], batch.schedule
    head_dim = v_cache.shape[3]
    assert schedule is not None, "a batch on a GPU comes with its tiles"
    _check_layout(qkv, k_cache, v_cache, num_heads)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    scale, cap = _exponents(scale * scales.key, soft_cap)
    sequences = (batch.block_tables, batch.seq_index)
    single_positions, chunk_positions, first_row = _parted(batch.positions, schedule)
    rope_write_(
        *(qkv, table, k_cache, v_cache, *sequences, chunk_positions),
        num_heads=num_heads,
        first_row=first_row,
        norms=norms,
        scales=scales,
    )
    attend_rows(
        *(qkv, table, k_cache, v_cache, *sequences, single_positions, schedule.arrivals, out),
        num_rows=schedule.num_single,
        max_splits=schedule.max_splits,
        scale=scale,
        cap=cap,
        norms=norms,
        scales=scales,
        window=window,
        tile=tile,
        split=split,
    )
    q = qkv[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)
    _attend_chunks(
        *(q, k_cache, v_cache, *sequences, chunk_positions, schedule, out),
        scale=scale,
        cap=cap,
        value_scale=scales.value,
        window=window,
        tile=tile,
        split=split,
    )
    return out


def attention_scratch_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_num_seqs: int, context_length: int, device: torch.device
) -> int:
    """The most that an attention takes for what programs leave to each other."""
    sizes = (num_heads, num_kv_heads, head_dim, max_num_seqs, context_length)
    return scratch_bytes(*sizes, SPLIT, limits(device)) + PARTS_BYTES


def _check_layout(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads: int) -> None:
    _, num_kv_heads, _, head_dim = v_cache.shape
    assert k_cache.transpose(2, 3).is_contiguous()
    assert v_cache.is_contiguous()
    assert qkv.stride(1) == 1
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim


def _parted(positions: Tensor, schedule: TileSchedule) -> tuple[Tensor, Tensor, int]:
    """Positions of single rows, those of others, and the first row that may be one of the others."""
    if schedule.single_positions is None or schedule.chunk_positions is None:
        return positions, positions, min(schedule.num_single, len(positions))
    return schedule.single_positions, schedule.chunk_positions, 0


def _attend_chunks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    schedule: TileSchedule,
    out: Tensor,
    *,
    scale: float,
    cap: float,
    value_scale: float,
    window: int,
    tile: int,
    split: int,
) -> None:
    where = (block_tables, seq_index, positions)
    attend_short(
        *(q, k_cache, v_cache, *where, schedule.items, schedule.arrivals, out),
        scale=scale,
        cap=cap,
        value_scale=value_scale,
        window=window,
        tile=tile,
        split=split,
    )
    attend_tiles(
        *(q, k_cache, v_cache, *where, schedule.tiles, schedule.arrivals, out),
        scale=scale,
        cap=cap,
        value_scale=value_scale,
        window=window,
        tile=tile,
        split=split,
    )


def _exponents(scale: float, soft_cap: float) -> tuple[float, float]:
    """`scale` and `cap` as `kernels.gpu.softmax.add_tile` takes them: in exponents of 2."""
    if soft_cap > 0:
        return 2.0 * scale / soft_cap * math.log2(math.e), soft_cap * math.log2(math.e)
    return scale * math.log2(math.e), 0.0
