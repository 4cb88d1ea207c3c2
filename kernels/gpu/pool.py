"""The paged pool: reading a tile of keys and values, and what a number is in it."""

from __future__ import annotations

from kernels._triton import tl, triton

#: The largest number of FP8.
_LARGEST = tl.constexpr(448.0)


@triton.jit
def stored(x, scale, P: tl.constexpr):
    """x in the pool's type P. FP8 holds x / scale, rounded to the nearest; beyond its largest number it is that."""
    if P.is_fp8():
        over = tl.div_rn(x.to(tl.float32), tl.full(x.shape, scale, tl.float32))
        x = tl.clamp(over, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(P)


@triton.jit
def _only(a, b):
    return a


@triton.jit
def widened(x, T: tl.constexpr):
    """A tile [R, C] of the pool in the type T of queries, exactly."""
    if x.dtype == T:
        return x
    # A product of 16 rows whose operand is seen to come from 8 bits is given 4 neighbours of K a lane instead of 2,
    # and so adds in another order than one of 128 rows. A reduction over nothing hides where the tile comes from.
    return tl.reduce(x.to(T)[:, None, :], 1, _only)


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
    d = tl.arange(0, BLOCK_D)[None, :]
    n_inside = n >= 0 if WHOLE else n < length
    # Keys are turned after they are loaded: both tiles then have the same addresses, and these are computed once.
    offset = slot_offset(table_ptr, n, kv_head, HKV, D, BLOCK_SIZE, n_inside)[:, None] + d
    if BLOCK_D == D:
        k = tl.load(k_cache_ptr + offset)
        v = tl.load(v_cache_ptr + offset) if WHOLE else tl.load(v_cache_ptr + offset, mask=n_inside[:, None], other=0.0)
    else:
        k = tl.load(k_cache_ptr + offset, mask=d < D, other=0.0)
        v = tl.load(v_cache_ptr + offset, mask=n_inside[:, None] & (d < D), other=0.0)
    return tl.trans(k), v
