"""Attention of chunks: a program takes a tile of one sequence's queries and walks their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.mode import in_force
from kernels.gpu.pool import key_tile
from kernels.gpu.softmax import add_tile, merge, nothing_seen
from kernels.gpu.splits import seen_by


@triton.jit
def walk_keys(
    q,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    position,
    start,
    end,
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
    """Attention of q [ROWS, BLOCK_D] at `position` [ROWS], from `start` on, to all keys before `end`."""
    unit = 1.0 if CAPPED else scale
    all_top, _, all_out = nothing_seen(ROWS, BLOCK_D)
    all_total = tl.zeros((ROWS,), tl.float32)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(start - WINDOW + 1, 0) // SPLIT * SPLIT
    for split in range(first_split, end, SPLIT):
        top, total, out = nothing_seen(ROWS, BLOCK_D)
        split_end = tl.minimum(split + SPLIT, end)
        edge = split  # from here on not all keys are seen by all rows
        if WINDOW == 0:
            edge = tl.maximum(tl.minimum((start + 1) // TILE * TILE, split_end), split)
            for key in range(split, edge, TILE):
                n = key + tl.arange(0, TILE)
                k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, end, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, True)
                top, total, out = add_tile(q, k, v, n, top, total, out, scale, cap, False, CAPPED, TILE)
        for key in range(edge, split_end, TILE):
            n = key + tl.arange(0, TILE)
            k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, end, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
            seen = seen_by(n, position[:, None], WINDOW)
            top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
        all_top, all_total, all_out = merge(all_top, all_total, all_out, top, tl.max(total, 1), out, unit)
    return all_out / all_total[:, None]


@triton.jit(do_not_specialize=["max_blocks"])
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    tiles_ptr,
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
    PDL: tl.constexpr,
):
    """ROWS are ROWS / PACK tokens by PACK query heads of one KV head."""
    begin(PDL)
    first = tl.load(tiles_ptr + 2 * tl.program_id(0))
    count = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    table_ptr = block_tables_ptr + tl.load(seq_index_ptr + first).to(tl.int64) * max_blocks
    start = tl.load(positions_ptr + first)
    end = tl.where(count > 0, start + count, 0)  # a tile of no rows is padding
    head_group = tl.program_id(1)
    kv_head = head_group * PACK // (HQ // HKV)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    token = r // PACK
    row = (first + token).to(tl.int64)
    head = head_group * PACK + r % PACK
    inside = (token < count)[:, None] & (d < D)[None, :]
    wait(PDL)
    q = tl.load(q_ptr + row[:, None] * q_stride + (head * D)[:, None] + d[None, :], mask=inside, other=0.0)
    out = walk_keys(
        *(q, k_cache_ptr, v_cache_ptr, table_ptr, start + token, start, end, kv_head, scale, cap),
        *(HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
    )
    out_ptrs = out_ptr + (row * HQ + head)[:, None] * D + d[None, :]
    tl.store(out_ptrs, (out * value_scale).to(out_ptr.dtype.element_ty), mask=inside)


def packed_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads of one KV head that share a program: the largest power of two, at most 8."""
    group = num_heads // num_kv_heads
    pack = 1
    while pack < 8 and group % (2 * pack) == 0:
        pack *= 2
    return pack


def query_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens in a tile of queries. 128 rows of a matrix product; fewer where a head is too wide for
    registers, or float32 for shared memory."""
    rows = 128 if head_dim <= 128 else 64
    if dtype == torch.float32:
        rows //= 4
    return rows // packed_heads(num_heads, num_kv_heads)


def takes_warpgroups(q: Tensor, v_cache: Tensor, *, cap: float, window: int, tile: int) -> bool:
    """Whether `kernels.gpu.hopper` computes this, with the same bits."""
    _, _, block_size, head_dim = v_cache.shape
    return (
        limits(q.device).warpgroups
        and q.dtype in (torch.bfloat16, torch.float16)
        and v_cache.dtype == q.dtype
        and head_dim in (64, 128)
        and (cap, window, tile) == (0, 0, 64)
        and (block_size in (16, 32) or block_size % 64 == 0)
    )


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    tiles: Tensor,
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
    """Fill `out` [M, HQ, D] for the rows that `tiles` int32 [num_tiles, 2] names as (first row, rows).

    A tile is rows of one sequence that follow each other, at most `query_tile`; tiles of no rows come last.
    q [M, HQ, D] may have a row stride; caches are [num_blocks, HKV, block_size, D]. `arrivals` int32 is zero, and then
    again. `scale` and `cap` are those of `add_tile`, no cap being 0; the answer is multiplied by `value_scale`."""
    if tiles.shape[0] == 0:
        return
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = v_cache.shape
    if takes_warpgroups(q, v_cache, cap=cap, window=window, tile=tile):
        from kernels.gpu import hopper  # needs a language that other devices' Triton need not have

        hopper.attend_tiles(
            *(q, k_cache, v_cache, block_tables, seq_index, positions, tiles, arrivals, out),
            scale=scale,
            value_scale=value_scale,
            split=split,
        )
        return
    pack = packed_heads(num_heads, num_kv_heads)
    limit = limits(q.device)
    wide = q.element_size() == 4  # float32 products take registers instead of tensor cores
    prefill_kernel[(tiles.shape[0], num_heads // pack)](
        *(q, k_cache, v_cache, block_tables, seq_index, positions, tiles, out),
        *(q.stride(0), block_tables.shape[1], scale, cap, value_scale),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=query_tile(num_heads, num_kv_heads, head_dim, q.dtype) * pack,
        PACK=pack,
        WINDOW=window,
        CAPPED=cap > 0,
        TILE=tile,
        # A window's keys are walked from the border of a split before it.
        SPLIT=split if window > 0 else in_force().chunk_split or split,
        PDL=limit.dependent,
        num_warps=8,
        num_stages=1 if wide else (5 if limit.shared_memory > 200_000 and head_dim <= 128 else 3),
        **limit.options,
    )
