"""Attention of single tokens, with the rotation and the write of the new key and value.

A sequence's splits are spread over programs, each of which keeps its partial results in memory; the
last one to arrive merges them left to right. Where there are rows enough to fill the device, one
program walks all splits instead. Both give the bits of `prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import Limits, begin, limits, wait
from kernels.gpu.pool import slot_offset, stored
from kernels.gpu.rope import rotated
from kernels.gpu.splits import merge_parts, one_split, walk_splits

if TYPE_CHECKING:
    from kernels.attention import HeadNorms
    from kernels.kv_cache import KVScales

#: Programs a multiprocessor should have before one walks all splits.
_PROGRAMS_PER_SM = 4

#: Bytes of shared memory beside a whole split, also for the programs of the next kernel.
_SPARE = 64 * 1024


@triton.jit
def load_query(
    heads_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    position,
    kv_head,
    key_scale,
    value_scale,
    eps,
    has_newest,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """The group's queries [ROWS, BLOCK_D], normed and turned. `has_newest`: ours is the split with the new token, which
    is written. Its key is the row after the queries, to be read and turned with them, and nobody's query."""
    GROUP: tl.constexpr = HQ // HKV
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)
    d_inside = (d < D)[None, :]
    head = tl.where(r < GROUP, kv_head * GROUP + r, HQ + kv_head)
    P: tl.constexpr = k_cache_ptr.dtype.element_ty
    TREE: tl.constexpr = heads_ptr.dtype.element_ty != P or (D != 128 and D != 256)
    turned = rotated(
        *(heads_ptr + head * D, (r <= GROUP) & d_inside, d, rope_ptr, position + r * 0),
        *(tl.where(r < GROUP, q_norm_ptr, k_norm_ptr), eps, D, ROTARY, NORMED, TREE),
    )
    value = tl.load(heads_ptr + (HQ + HKV + kv_head) * D + d, mask=d < D)
    if has_newest:
        slot = slot_offset(table_ptr, position, kv_head, HKV, D, BLOCK_SIZE, position >= 0)
        key_ptrs = k_cache_ptr + slot + r * 0 + d[None, :]
        tl.store(key_ptrs, stored(turned, key_scale, P), mask=(r == GROUP) & d_inside)
        tl.store(v_cache_ptr + slot + d, stored(value, value_scale, P), mask=d < D)
        tl.debug_barrier()
    return turned


@triton.jit(do_not_specialize=["max_blocks", "max_splits"])
def decode_kernel(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    parts_ptr,
    outs_ptr,
    arrivals_ptr,
    out_ptr,
    qkv_stride,
    max_blocks,
    max_splits,
    scale,
    cap,
    key_scale,
    value_scale,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (kv head, row, p) takes the row's splits p, p + P, …; those that find none come last."""
    begin(PDL)
    kv_head, program, num_programs = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions_ptr + row)
    length = position + 1
    first_split = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    num_splits = tl.cdiv(length, SPLIT) - first_split
    if program >= num_splits:
        return
    table_ptr = block_tables_ptr + tl.load(seq_index_ptr + row).to(tl.int64) * max_blocks
    wait(PDL)
    q = load_query(
        *(qkv_ptr + row * qkv_stride, rope_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr, table_ptr),
        *(position, kv_head, key_scale, value_scale, eps, (num_splits - 1) % num_programs == program),
        *(HQ, HKV, D, BLOCK_D, ROTARY, BLOCK_SIZE, ROWS, NORMED),
    )
    keep_row(
        *(q, k_cache_ptr, v_cache_ptr, table_ptr, length, first_split, num_splits, kv_head, row, scale, cap),
        *(value_scale, parts_ptr, outs_ptr, arrivals_ptr, out_ptr, max_splits, tl.num_programs(1)),
        *(HQ, HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, WALK, TILE, SPLIT),
    )


@triton.jit
def keep_row(
    q,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    length,
    first_split,
    num_splits,
    kv_head,
    row,
    scale,
    cap,
    value_scale,
    parts_ptr,
    outs_ptr,
    arrivals_ptr,
    out_ptr,
    max_splits,
    num_rows,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute and store the row's heads, or this program's splits of them, and all if it is the last to arrive."""
    GROUP: tl.constexpr = HQ // HKV
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (r < GROUP) & (d < D)
    out_ptrs = out_ptr + (row * HQ + kv_head * GROUP + r) * D + d
    T: tl.constexpr = out_ptr.dtype.element_ty
    if WALK:
        out = walk_splits(
            *(q, k_cache_ptr, v_cache_ptr, table_ptr, length, first_split, kv_head, scale, cap),
            *(HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
        )
        tl.store(out_ptrs, (out * value_scale).to(T), mask=inside)
    else:
        program, num_programs = tl.program_id(2), tl.num_programs(2)
        first_part = (row * HKV + kv_head) * max_splits * GROUP
        plane = num_rows.to(tl.int64) * HKV * max_splits * GROUP
        g = tl.arange(0, ROWS)
        for index in range(program, num_splits, num_programs):
            top, total, out = one_split(
                *(q, k_cache_ptr, v_cache_ptr, table_ptr, length - 1, (first_split + index) * SPLIT, length),
                *(kv_head, scale, cap),
                *(HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
            )
            part = first_part + index * GROUP + g
            tl.store(parts_ptr + part, top, mask=g < GROUP)
            tl.store(parts_ptr + plane + part, total, mask=g < GROUP)
            tl.store(outs_ptr + part[:, None] * D + d, out, mask=inside)
        tl.debug_barrier()
        counter = arrivals_ptr + row * HKV + kv_head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.minimum(num_programs, num_splits) - 1:
            tl.store(counter, 0)
            unit = 1.0 if CAPPED else scale
            out = merge_parts(parts_ptr, outs_ptr, plane, first_part, num_splits, unit, GROUP, D, BLOCK_D, ROWS)
            tl.store(out_ptrs, (out * value_scale).to(T), mask=inside)


@dataclass(frozen=True, slots=True)
class Spread:
    """How the splits of a row are shared out: over `programs` of them, or all walked by one (1)."""

    programs: int
    warps: int
    stages: int


def choose_spread(num_rows: int, num_kv_heads: int, max_splits: int, *, limit: Limits, split_bytes: int) -> Spread:
    """Free to choose: all give the same bits. Warps and stages were tuned inside whole steps on an H200. `split_bytes`
    are those of the keys and values of a split."""
    programs = min(max_splits, max(1, _PROGRAMS_PER_SM * limit.num_sms // (num_rows * num_kv_heads)))
    if programs == 1:
        return Spread(1, warps=2, stages=3)
    if num_rows <= 4:  # two stages a tile, whose addresses are loaded too: one row has all tiles of a split under way
        whole = num_rows == 1 and split_bytes <= limit.shared_memory - _SPARE
        return Spread(programs, warps=2, stages=9 if whole else 5)
    return Spread(programs, warps=4, stages=3)


def scratch_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int, context_length: int, split: int, limit: Limits
) -> int:
    """The most that `attend_rows` takes for parts: with more rows one program walks all splits."""
    rows = min(max_rows, _PROGRAMS_PER_SM * limit.num_sms // num_kv_heads)
    return rows * num_heads * triton.cdiv(context_length, split) * (head_dim + 2) * 4


def _memory_of(parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Largest scores and totals [2, parts], and outputs [parts, head_dim]."""
    partial = torch.empty(2, parts, dtype=torch.float32, device=device)
    return partial, torch.empty(parts, head_dim, dtype=torch.float32, device=device)


def attend_rows(
    qkv: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    num_rows: int,
    max_splits: int,
    scale: float,
    cap: float,
    norms: HeadNorms | None,
    scales: KVScales,
    window: int,
    tile: int,
    split: int,
) -> None:
    """Fill the first `num_rows` rows of `out` [M, HQ, D], each the newest token of a sequence of its own.

    qkv [M, (HQ + 2 * HKV) * D] is a fused projection, whose heads are normed (with `norms`), turned by `table` (float32
    [num_positions, rotary_dim]) and written here. `arrivals` int32 [>= num_rows * HKV] is zero, and is left so.
    `max_splits` bounds the splits of a row. A position below 0 skips its row. `scale` is that of queries and of keys
    as the pool has them, `scales` those of an FP8 pool.
    """
    if num_rows == 0:
        return
    (_, num_heads, head_dim), (_, num_kv_heads, block_size, _) = out.shape, v_cache.shape
    limit = limits(qkv.device)
    split_bytes = 2 * split * head_dim * k_cache.element_size()
    spread = choose_spread(num_rows, num_kv_heads, max_splits, limit=limit, split_bytes=split_bytes)
    parts = 0 if spread.programs == 1 else num_rows * num_heads * max_splits
    partial, outs = _memory_of(parts, head_dim, qkv.device)
    decode_kernel[(num_kv_heads, num_rows, spread.programs)](
        *(qkv, table, *((qkv, qkv) if norms is None else (norms.query, norms.key))),
        *(k_cache, v_cache, block_tables, seq_index, positions),
        *(partial, outs, arrivals, out, qkv.stride(0), block_tables.shape[1], max_splits, scale, cap),
        *(scales.key, scales.value, 0.0 if norms is None else norms.eps),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=table.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads + 1)),
        WINDOW=window,
        CAPPED=cap > 0,
        WALK=spread.programs == 1,
        TILE=tile,
        SPLIT=split,
        NORMED=norms is not None,
        PDL=limit.dependent,
        num_warps=spread.warps,
        num_stages=1 if qkv.element_size() == 4 else spread.stages,
        **limit.options,
    )
