"""Attention to the splits of a context: one split, all of them, and splits merged from memory."""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.gpu.pool import key_tile
from kernels.gpu.softmax import add_tile, merge, nothing_seen


@triton.jit
def seen_by(n, position, WINDOW: tl.constexpr):
    """Which positions n [TILE] a token at `position` sees: [1, TILE], or [R, TILE] for positions [R, 1]."""
    seen = n[None, :] <= position
    if WINDOW > 0:
        seen &= n[None, :] > position - WINDOW
    return seen


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
        seen = seen_by(n, length - 1, WINDOW)
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
    position,
    split,
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
    """(top, total, out) of the split that begins at position `split`, of keys before `end`. `position` is that of all
    rows of q, or [ROWS, 1].
    """
    top, total, out = nothing_seen(ROWS, BLOCK_D)
    for key in range(split, tl.minimum(split + SPLIT, end), TILE):
        n = key + tl.arange(0, TILE)
        k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, end, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
        seen = seen_by(n, position, WINDOW)
        top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
    return top, tl.max(total, 1), out


@triton.jit
def load_part(
    parts_ptr,
    outs_ptr,
    plane,
    first_part,
    index,
    num_splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(top, total, out) of a split that another program left in memory; past the last one, of no keys."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    part = first_part + index * GROUP + r
    there = (r < GROUP) & (index < num_splits)
    # Written by other processors: not through this one's first-level cache.
    top = tl.load(parts_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(parts_ptr + plane + part, mask=there, other=0.0, cache_modifier=".cg")
    inside = there[:, None] & (d < D)[None, :]
    out = tl.load(outs_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return top, total, out


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
    top, _, out = nothing_seen(ROWS, BLOCK_D)
    total = tl.zeros((ROWS,), tl.float32)
    for i in range(0, num_splits, 4):  # four under way together
        where = (parts_ptr, outs_ptr, plane, first_part)
        top_0, total_0, out_0 = load_part(*where, i, num_splits, GROUP, D, BLOCK_D, ROWS)
        top_1, total_1, out_1 = load_part(*where, i + 1, num_splits, GROUP, D, BLOCK_D, ROWS)
        top_2, total_2, out_2 = load_part(*where, i + 2, num_splits, GROUP, D, BLOCK_D, ROWS)
        top_3, total_3, out_3 = load_part(*where, i + 3, num_splits, GROUP, D, BLOCK_D, ROWS)
        top, total, out = merge(top, total, out, top_0, total_0, out_0, unit)
        top, total, out = merge(top, total, out, top_1, total_1, out_1, unit)
        top, total, out = merge(top, total, out, top_2, total_2, out_2, unit)
        top, total, out = merge(top, total, out, top_3, total_3, out_3, unit)
    return out / total[:, None]
