"""Reading a tile of keys and values out of the paged pool."""

from __future__ import annotations

from kernels._triton import tl, triton


@triton.jit
def slot_offset(table_ptr, n, kv_head, HKV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, inside):
    """Where the positions n of a sequence lie in the pool; `table_ptr` is its block table."""
    block = tl.load(table_ptr + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return ((block * HKV + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE) * D


@triton.jit
def key_tile(
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    n,
    length,
    kv_head,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """k [BLOCK_D, TILE] and v [TILE, BLOCK_D] of the positions n. Values from `length` on are 0, keys anything;
    with WHOLE all positions are below `length`.
    """
    d = tl.arange(0, BLOCK_D)
    n_inside = n >= 0 if WHOLE else n < length
    offset = slot_offset(table_ptr, n, kv_head, HKV, D, BLOCK_SIZE, n_inside)
    k_ptrs = k_cache_ptr + offset[None, :] + d[:, None]
    v_ptrs = v_cache_ptr + offset[:, None] + d[None, :]
    if BLOCK_D == D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs) if WHOLE else tl.load(v_ptrs, mask=n_inside[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=n_inside[:, None] & (d < D)[None, :], other=0.0)
    return k, v
