"""The arithmetic of attention, shared by all of its kernels, which therefore give the same bits.

A split of 256 keys is an online softmax over tiles of 64 keys; splits are merged left to right. The
sum of the probabilities is a matrix product with ones: a plain sum's order depends on how warps
divide the keys (measured: 27 of 6 million outputs change), the product's does not.
"""

from __future__ import annotations

from kernels._triton import tl, triton
from kernels.gpu.pool import widened

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def weigh(scores, top, unit, MASKED: tl.constexpr):
    """(highest [R], fade [R], weights [R, TILE]) of a tile's scores [R, TILE], those that are not seen being -inf.

    `top` [R] is the largest score before, `highest` the largest now, `fade` what sums so far are to be multiplied
    by. `unit` takes a score to an exponent of 2. Without MASKED all are seen.
    """
    highest = tl.maximum(top, tl.max(scores, 1))
    base = highest
    if MASKED:
        base = tl.where(highest == NEGATIVE_INFINITY, 0.0, highest)  # a row that has seen nothing: no NaN
    return highest, tl.exp2((top - base) * unit), tl.exp2(tl.fma(scores, unit, -(base * unit)[:, None]))


@triton.jit
def add_tile(
    q, k, v, seen, top, total, out, scale, cap, MASKED: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr
):
    """Join one tile: q [R, D], k [D, TILE] and v [TILE, D] as the pool has them, seen [R, TILE] → (top, total, out).
    Without MASKED all keys are seen by all rows, which saves time and changes no bit.

    `top` [R] is the largest score, `total` [R, 16] the sum of exponentials in every column, `out`
    [R, D] the weighted values. `scale` takes a product to the exponent of 2. With CAPPED it takes it to
    that of tanh's e^2x, and the exponent is cap * tanh(x).
    """
    k, v = widened(k, q.dtype), widened(v, q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    if CAPPED:
        # tanh by exp2, as one expression for every launch shape.
        grown = tl.exp2(scores * scale)
        scores = cap * (1.0 - 2.0 / (grown + 1.0))
    if MASKED:
        scores = tl.where(seen, scores, NEGATIVE_INFINITY)
    highest, fade, weights = weigh(scores, top, 1.0 if CAPPED else scale, MASKED)
    fade, weights = fade[:, None], weights.to(v.dtype)
    ones = tl.full((TILE, 16), 1.0, v.dtype)
    total = tl.dot(weights, ones, total * fade, input_precision="ieee")
    out = tl.dot(weights, v, out * fade, input_precision="ieee")
    return highest, total, out


@triton.jit
def shares(top, later_top, unit):
    """(highest, fade, grow) [R]: what the sums of two splits are to be multiplied by before they are added."""
    highest = tl.maximum(top, later_top)
    base = tl.where(highest == NEGATIVE_INFINITY, 0.0, highest)
    return highest, tl.exp2((top - base) * unit), tl.exp2((later_top - base) * unit)


@triton.jit
def merge(top, total, out, later_top, later_total, later_out, unit):
    """Join two splits, the later one second. Totals here are [R]; `unit` takes a score to an exponent of 2."""
    highest, fade, grow = shares(top, later_top, unit)
    return highest, tl.fma(total, fade, later_total * grow), tl.fma(out, fade[:, None], later_out * grow[:, None])


@triton.jit
def nothing_seen(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(top, total, out) of no keys, as `add_tile` carries them."""
    top = tl.full((ROWS,), NEGATIVE_INFINITY, tl.float32)
    return top, tl.zeros((ROWS, 16), tl.float32), tl.zeros((ROWS, BLOCK_D), tl.float32)
