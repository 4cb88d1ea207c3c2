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
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.pool import key_tile, slot_offset
from kernels.gpu.rope import rotated, write_new_kv
from kernels.gpu.softmax import add_tile, merge, nothing_seen

if TYPE_CHECKING:
    from kernels.kv_cache import KVScales

#: Programs a multiprocessor should have before one walks all splits.
_PROGRAMS_PER_SM = 4


@triton.jit
def seen_by(n, length, WINDOW: tl.constexpr):
    """Which positions n the last token of a sequence sees, as a row [1, TILE]."""
    seen = n < length
    if WINDOW > 0:
        seen &= n >= length - WINDOW
    return seen[None, :]


@triton.jit
def walk_splits(
    q,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    length,
    first_split,
    kv_head,
    scale,
    cap,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """All splits of a row, by one program: [ROWS, BLOCK_D]."""
    unit = 1.0 if CAPPED else scale
    TILES_PER_SPLIT: tl.constexpr = SPLIT // TILE
    top, total, out = nothing_seen(ROWS, BLOCK_D)
    all_top, _, all_out = nothing_seen(ROWS, BLOCK_D)
    all_total = tl.zeros((ROWS,), tl.float32)
    num_tiles = tl.cdiv(length, TILE)
    # One flat loop, so that the loads of a split's first tile are under way before the last one ends.
    for i in range(first_split * TILES_PER_SPLIT, num_tiles):
        n = i * TILE + tl.arange(0, TILE)
        k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, length, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
        seen = seen_by(n, length, WINDOW)
        top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
        if (i % TILES_PER_SPLIT == TILES_PER_SPLIT - 1) | (i == num_tiles - 1):
            all_top, all_total, all_out = merge(all_top, all_total, all_out, top, tl.max(total, 1), out, unit)
            top, total, out = nothing_seen(ROWS, BLOCK_D)
    return all_out / all_total[:, None]


@triton.jit
def one_split(
    q,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    split,
    length,
    kv_head,
    scale,
    cap,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """(top, total, out) of the split that begins at position `split`."""
    top, total, out = nothing_seen(ROWS, BLOCK_D)
    for key in range(split, tl.minimum(split + SPLIT, length), TILE):
        n = key + tl.arange(0, TILE)
        k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, length, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
        seen = seen_by(n, length, WINDOW)
        top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
    return top, tl.max(total, 1), out


@triton.jit
def merge_parts(
    parts_ptr,
    outs_ptr,
    plane,
    first_part,
    num_splits,
    unit,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The splits that other programs left in memory, merged left to right: [ROWS, BLOCK_D]."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (r < GROUP)[:, None] & (d < D)[None, :]
    all_top, _, all_out = nothing_seen(ROWS, BLOCK_D)
    all_total = tl.zeros((ROWS,), tl.float32)
    for index in range(0, num_splits):
        part = first_part + index * GROUP + r
        # Written by other processors: not through this one's first-level cache.
        top = tl.load(parts_ptr + part, mask=r < GROUP, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(parts_ptr + plane + part, mask=r < GROUP, other=0.0, cache_modifier=".cg")
        out = tl.load(outs_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        all_top, all_total, all_out = merge(all_top, all_total, all_out, top, total, out, unit)
    return all_out / all_total[:, None]


@triton.jit
def load_query(
    heads_ptr,
    rope_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    position,
    kv_head,
    key_scale,
    value_scale,
    has_newest,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    T: tl.constexpr,
):
    """The group's queries [ROWS, BLOCK_D], turned. `has_newest`: ours is the split with the new token; write it."""
    GROUP: tl.constexpr = HQ // HKV
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (r < GROUP)[:, None] & (d < D)[None, :]
    q_ptrs = heads_ptr + (kv_head * GROUP + r)[:, None] * D
    if ROTARY == 0:
        return tl.load(q_ptrs + d[None, :], mask=inside, other=0.0)
    if has_newest:
        slot = slot_offset(table_ptr, position, kv_head, HKV, D, BLOCK_SIZE, position >= 0)
        k_ptr = heads_ptr + (HQ + kv_head) * D
        write_new_kv(
            *(k_ptr, k_ptr + HKV * D, k_cache_ptr, v_cache_ptr, slot, rope_ptr, position),
            *(key_scale, value_scale, d, D, ROTARY),
        )
        tl.debug_barrier()
    return rotated(q_ptrs, inside, d, rope_ptr, position + r[:, None] * 0, ROTARY, T)


@triton.jit(do_not_specialize=["max_blocks", "max_splits"])
def decode_kernel(
    qkv_ptr,
    rope_ptr,
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
    PDL: tl.constexpr,
):
    """Program (p, kv head, row) takes the row's splits p, p + P, …. ROTARY is 0 for queries turned already."""
    begin(PDL)
    program, num_programs, kv_head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions_ptr + row)
    length = position + 1
    first_split = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    num_splits = tl.cdiv(length, SPLIT) - first_split
    if program >= num_splits:
        return
    table_ptr = block_tables_ptr + tl.load(seq_index_ptr + row).to(tl.int64) * max_blocks
    wait(PDL)
    q = load_query(
        *(qkv_ptr + row * qkv_stride, rope_ptr, k_cache_ptr, v_cache_ptr, table_ptr, position, kv_head),
        *(key_scale, value_scale, (num_splits - 1) % num_programs == program),
        *(HQ, HKV, D, BLOCK_D, ROTARY, BLOCK_SIZE, ROWS, out_ptr.dtype.element_ty),
    )
    keep_row(
        *(q, k_cache_ptr, v_cache_ptr, table_ptr, length, first_split, num_splits, kv_head, row, scale, cap),
        *(value_scale, parts_ptr, outs_ptr, arrivals_ptr, out_ptr, max_splits, tl.num_programs(2)),
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
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        first_part = (row * HKV + kv_head) * max_splits * GROUP
        plane = num_rows.to(tl.int64) * HKV * max_splits * GROUP
        g = tl.arange(0, ROWS)
        for index in range(program, num_splits, num_programs):
            top, total, out = one_split(
                *(q, k_cache_ptr, v_cache_ptr, table_ptr, (first_split + index) * SPLIT, length, kv_head, scale, cap),
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


def choose_spread(num_rows: int, num_kv_heads: int, max_splits: int, *, num_sms: int) -> Spread:
    """Free to choose: all give the same bits. Warps and stages were tuned inside whole steps on an H200."""
    programs = min(max_splits, max(1, _PROGRAMS_PER_SM * num_sms // (num_rows * num_kv_heads)))
    if programs == 1:
        return Spread(1, warps=2, stages=3)
    if num_rows <= 4:
        return Spread(programs, warps=2, stages=5)
    return Spread(programs, warps=4, stages=3)


def attend_rows(
    qkv: Tensor,
    table: Tensor | None,
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
    scales: KVScales,
    window: int,
    tile: int,
    split: int,
    spread: Spread | None = None,
) -> None:
    """Fill the first `num_rows` rows of `out` [M, HQ, D], each the newest token of a sequence of its own.

    With a `table` (float32 [num_positions, rotary_dim]) qkv [M, (HQ + 2 * HKV) * D] is a fused projection,
    turned and written here; without one it is queries [M, HQ * D]. `arrivals` int32 [>= num_rows * HKV] is
    zero, and is left so. `max_splits` bounds the splits of a row. A position below 0 skips its row. `scale` is that of
    queries and of keys as the pool has them, `scales` those of an FP8 pool.
    """
    if num_rows == 0:
        return
    _, num_heads, head_dim = out.shape
    _, num_kv_heads, block_size, _ = v_cache.shape
    group = num_heads // num_kv_heads
    limit = limits(qkv.device)
    spread = spread or choose_spread(num_rows, num_kv_heads, max_splits, num_sms=limit.num_sms)
    walk = spread.programs == 1
    parts = 0 if walk else num_rows * num_kv_heads * max_splits * group
    partial = torch.empty(2, parts, dtype=torch.float32, device=qkv.device)  # largest scores, totals
    outs = torch.empty(parts, head_dim, dtype=torch.float32, device=qkv.device)
    decode_kernel[(spread.programs, num_kv_heads, num_rows)](
        *(qkv, qkv if table is None else table, k_cache, v_cache, block_tables, seq_index, positions),
        *(partial, outs, arrivals, out, qkv.stride(0), block_tables.shape[1], max_splits, scale, cap),
        *(scales.key, scales.value),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=0 if table is None else table.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        WINDOW=window,
        CAPPED=cap > 0,
        WALK=walk,
        TILE=tile,
        SPLIT=split,
        PDL=limit.dependent,
        num_warps=spread.warps,
        num_stages=1 if qkv.element_size() == 4 else spread.stages,
        **limit.options,
    )
