"""The query of a single token, and attention to a split whose keys are asked for before the query is there."""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.gpu.launch import wait
from kernels.gpu.pool import key_tile, slot_offset, stored
from kernels.gpu.rope import rotated, turning
from kernels.gpu.softmax import add_tile, nothing_seen
from kernels.gpu.splits import seen_by


@triton.jit
def before_query(
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
    """What `load_query` takes, none of which a kernel of the step writes: read before the wait."""
    GROUP: tl.constexpr = HQ // HKV
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)
    norm_ptrs = tl.where(r < GROUP, q_norm_ptr, k_norm_ptr)
    turn = turning((r <= GROUP) & (d < D)[None, :], d, rope_ptr, position + r * 0, norm_ptrs, ROTARY, NORMED)
    slot = slot_offset(table_ptr, position, kv_head, HKV, D, BLOCK_SIZE, position >= 0)
    return heads_ptr, turn, k_cache_ptr + slot, v_cache_ptr + slot, kv_head, key_scale, value_scale, eps, has_newest


@triton.jit
def load_query(
    heads_ptr,
    turn,
    key_ptr,
    value_ptr,
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
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """The group's queries [ROWS, BLOCK_D], normed and turned. `has_newest`: ours is the split with the new token, which
    is written. Its key is the row after the queries, to be read and turned with them, and nobody's query."""
    GROUP: tl.constexpr = HQ // HKV
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)
    inside = (r <= GROUP) & (d < D)[None, :]
    head = tl.where(r < GROUP, kv_head * GROUP + r, HQ + kv_head)
    P: tl.constexpr = key_ptr.dtype.element_ty
    TREE: tl.constexpr = heads_ptr.dtype.element_ty != P or (D != 128 and D != 256)
    turned = rotated(heads_ptr + head * D, inside, d, turn, eps, D, ROTARY, NORMED, TREE)
    value = tl.load(heads_ptr + (HQ + HKV + kv_head) * D + d, mask=d < D)
    if has_newest:
        tl.store(key_ptr + r * 0 + d[None, :], stored(turned, key_scale, P), mask=(r == GROUP) & inside)
        tl.store(value_ptr + d, stored(value, value_scale, P), mask=d < D)
    return turned


@triton.jit
def early_split(
    q,
    query,
    is_first,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    position,
    split,
    kv_head,
    scale,
    cap,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """(q, top, total, out): the last three of the split that begins at position `split`, as `one_split` has them.

    In a program's first split q is nothing yet, and is read by `load_query(*query, ...)` in the loop, after the wait.
    The compiler sends for the tiles of the first iterations before the loop, and so before the wait: their keys and
    values are of earlier steps, but for the tile of the newest key, which comes behind the loop. Where a prompt is
    cached to its end, its last key is written anew into a block that others may read in the same step: the same bits.
    """
    newest = position // TILE * TILE
    top, total, out = nothing_seen(ROWS, BLOCK_D)
    # Once at least, to wait: a tile that is not seen changes nothing.
    for key in range(split, tl.maximum(tl.minimum(split + SPLIT, newest), split + 1), TILE):
        n = key + tl.arange(0, TILE)
        k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, newest, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
        if is_first & (key == split):
            wait(PDL)
            q = load_query(*query, HQ, HKV, D, BLOCK_D, ROTARY, ROWS, NORMED)
        seen = seen_by(n, position, WINDOW) & (n < newest)[None, :]
        top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
    if newest < split + SPLIT:
        tl.debug_barrier()  # what `load_query` wrote
        n = newest + tl.arange(0, TILE)
        end = position + 1
        k, v = key_tile(k_cache_ptr, v_cache_ptr, table_ptr, n, end, kv_head, HKV, D, BLOCK_D, BLOCK_SIZE, False)
        seen = seen_by(n, position, WINDOW)
        top, total, out = add_tile(q, k, v, seen, top, total, out, scale, cap, True, CAPPED, TILE)
    return q, top, tl.max(total, 1), out
