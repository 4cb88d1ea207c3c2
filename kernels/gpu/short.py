"""Attention of short chunks: the splits of a tile's context are spread over programs, as in `decode`, and a program has
many queries, as in `prefill`. Gives the bits of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.prefill import packed_heads
from kernels.gpu.softmax import merge, nothing_seen
from kernels.gpu.splits import one_split
from kernels.short_chunks import ITEM_COLUMNS, ShortTiles


@triton.jit
def joined(
    tops_ptr,
    totals_ptr,
    outs_ptr,
    first_part,
    num_splits,
    unit,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parts from `first_part` on, merged left to right: [ROWS, BLOCK_D]. Of this many rows one is under way at a
    time: four, as `splits.merge_parts` has them, would not fit into registers.
    """
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    all_top, _, all_out = nothing_seen(ROWS, BLOCK_D)
    all_total = tl.zeros((ROWS,), tl.float32)
    for index in tl.range(0, num_splits, num_stages=3):
        part = (first_part + index) * ROWS + r
        # Written by other processors: not through this one's first-level cache.
        top = tl.load(tops_ptr + part, cache_modifier=".cg")
        total = tl.load(totals_ptr + part, cache_modifier=".cg")
        out_ptrs = outs_ptr + part.to(tl.int64)[:, None] * D + d[None, :]
        out = tl.load(out_ptrs, mask=(d < D)[None, :], other=0.0, cache_modifier=".cg")
        all_top, all_total, all_out = merge(all_top, all_total, all_out, top, total, out, unit)
    return all_out / all_total[:, None]


@triton.jit(do_not_specialize=["max_blocks"])
def short_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    items_ptr,
    tops_ptr,
    totals_ptr,
    outs_ptr,
    arrivals_ptr,
    out_ptr,
    q_stride,
    max_blocks,
    scale,
    cap,
    value_scale,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (group of heads, item). ROWS are ROWS / PACK tokens by PACK query heads of one KV head."""
    begin(PDL)
    item_ptr = items_ptr + tl.program_id(1) * COLUMNS
    first, count, program = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    num_programs, first_part = tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    if count == 0:  # padding, which comes last
        if tl.program_id(1) == 0:  # all is: the kernel must not end before the one before it
            wait(PDL)
        return
    table_ptr = block_tables_ptr + tl.load(seq_index_ptr + first).to(tl.int64) * max_blocks
    start = tl.load(positions_ptr + first)
    end = start + count
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    kv_head = group * PACK // (HQ // HKV)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    token = r // PACK
    row = (first + token).to(tl.int64)
    head = group * PACK + r % PACK
    inside = (token < count)[:, None] & (d < D)[None, :]
    wait(PDL)
    q = tl.load(q_ptr + row[:, None] * q_stride + (head * D)[:, None] + d[None, :], mask=inside, other=0.0)
    first_split = tl.maximum(start - WINDOW + 1, 0) // SPLIT if WINDOW > 0 else 0
    num_splits = tl.cdiv(end, SPLIT)
    first_part += group * num_splits
    unit = 1.0 if CAPPED else scale
    position = (start + token)[:, None]
    all_top, _, all_out = nothing_seen(ROWS, BLOCK_D)
    all_total = tl.zeros((ROWS,), tl.float32)
    for split in range(first_split + program, num_splits, num_programs):
        top, total, out = one_split(
            *(q, k_cache_ptr, v_cache_ptr, table_ptr, position, split * SPLIT, end, kv_head, scale, cap),
            *(HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
        )
        if num_programs == 1:
            all_top, all_total, all_out = merge(all_top, all_total, all_out, top, total, out, unit)
        else:
            part = (first_part + split) * ROWS + r
            tl.store(tops_ptr + part, top)
            tl.store(totals_ptr + part, total)
            tl.store(outs_ptr + part.to(tl.int64)[:, None] * D + d[None, :], out, mask=(d < D)[None, :])
    out_ptrs = out_ptr + (row * HQ + head)[:, None] * D + d[None, :]
    T: tl.constexpr = out_ptr.dtype.element_ty
    if num_programs == 1:
        tl.store(out_ptrs, (all_out / all_total[:, None] * value_scale).to(T), mask=inside)
        return
    tl.debug_barrier()
    counter = arrivals_ptr + (first * num_groups + group)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(counter, 0)
        out = joined(
            *(tops_ptr, totals_ptr, outs_ptr, first_part + first_split, num_splits - first_split, unit),
            *(ROWS, D, BLOCK_D),
        )
        tl.store(out_ptrs, (out * value_scale).to(T), mask=inside)


def short_tiles(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> ShortTiles:
    """Tiles of 64 rows, the least of Hopper's matrix product; fewer where heads or products take all registers."""
    pack = packed_heads(num_heads, num_kv_heads)
    rows = 16 if dtype == torch.float32 else 64 if head_dim <= 128 else 32
    return ShortTiles(rows, rows // pack, num_heads // pack, head_dim)


def attend_short(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    items: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    scale: float,
    cap: float,
    value_scale: float,
    window: int,
    tile: int,
    split: int,
) -> None:
    """Fill `out` [M, HQ, D] for the rows that `items` int32 [num_items, 5] (`ShortTiles.items`) name.

    q [M, HQ, D] may have a row stride; caches are [num_blocks, HKV, block_size, D]. `arrivals` int32 [M * HQ or more]
    is zero, and is left so. `scale` and `cap` are those of `add_tile`, no cap being 0; `value_scale` an FP8 pool's.
    """
    if items.shape[0] == 0:
        return
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = v_cache.shape
    tiles = short_tiles(num_heads, num_kv_heads, head_dim, q.dtype)
    limit = limits(q.device)
    num_sums = tiles.num_parts * tiles.rows
    tops, totals = torch.empty(2, num_sums, dtype=torch.float32, device=q.device)
    outs = torch.empty(num_sums, head_dim, dtype=torch.float32, device=q.device)
    short_kernel[(tiles.groups, items.shape[0])](
        *(q, k_cache, v_cache, block_tables, seq_index, positions, items, tops, totals, outs, arrivals, out),
        *(q.stride(0), block_tables.shape[1], scale, cap, value_scale),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=tiles.rows,
        PACK=packed_heads(num_heads, num_kv_heads),
        WINDOW=window,
        CAPPED=cap > 0,
        TILE=tile,
        SPLIT=split,
        COLUMNS=ITEM_COLUMNS,
        PDL=limit.dependent,
        num_warps=4,
        num_stages=1 if q.element_size() == 4 else (3 if head_dim <= 128 else 2),
        **limit.options,
    )
