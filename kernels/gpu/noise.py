"""Gumbel noise as a function of (seed, position, token id), operation by operation that of kernels/cpu/noise.h.

Each step is exactly rounded and compiled without contraction, so a GPU and a CPU draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton

_BLOCK = 1024


@triton.jit
def philox_words(seed, position, ids):
    """First word of Philox4x32-10 (Salmon et al., SC'11), key = int64 seed, counter = (position, id, 0, 0)."""
    c1 = ids.to(tl.uint32)
    c0 = position.to(tl.uint32) + tl.zeros_like(c1)
    c2 = tl.zeros_like(c1)
    c3 = tl.zeros_like(c1)
    k0 = seed.to(tl.uint32) + tl.zeros_like(c1)
    k1 = (seed >> 32).to(tl.uint32) + tl.zeros_like(c1)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0


@triton.jit
def log_reduced(f, k):
    """ln(2^k (1 + f)) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; k float32."""
    p = tl.zeros_like(f) - 0.07636439055204391
    p = tl.fma(p, f, 0.12762217223644257)
    p = tl.fma(p, f, -0.13159610331058502)
    p = tl.fma(p, f, 0.14201579988002777)
    p = tl.fma(p, f, -0.166234090924263)
    p = tl.fma(p, f, 0.2000124156475067)
    p = tl.fma(p, f, -0.2500081956386566)
    p = tl.fma(p, f, 0.3333333134651184)
    square = f * f
    tail = tl.fma(p * f, square, k * -2.12194440e-4)
    tail = tl.fma(-0.5 + tl.zeros_like(f), square, tail)
    return tl.fma(k, 0.693359375, f + tail)


@triton.jit
def log_normal(x):
    """ln x of normal positive float32."""
    SQRT_HALF: tl.constexpr = 0x3F3504F3
    offset = x.to(tl.int32, bitcast=True) - SQRT_HALF
    mantissa = ((offset & 0x7FFFFF) + SQRT_HALF).to(tl.float32, bitcast=True)
    return log_reduced(mantissa - 1.0, (offset >> 23).to(tl.float32))


@triton.jit
def gumbel(words):
    """-ln(-ln u) for u = (w >> 8) * 2^-24 + 2^-25, at most 1 - 2^-24; near 1 the logarithm is of the exact 1 - u."""
    UNIT: tl.constexpr = 5.9604644775390625e-08  # 2^-24
    n = (words >> 8).to(tl.int32)
    above = (0xFFFFFF - n).to(tl.float32) * UNIT + UNIT / 2
    above = tl.maximum(above, UNIT)
    uniform = n.to(tl.float32) * UNIT + UNIT / 2
    near_one = log_reduced(-above, tl.zeros_like(above))
    minus_log = -tl.where(above < 0.29, near_one, log_normal(uniform))
    return -log_normal(minus_log)


@triton.jit
def gumbel_bound(words):
    """More than `gumbel(words)`, by less than 0.09 where that is 3 to 16.6. Of u it takes that -ln u is at least 1 - u;
    and log2 of a float is at least what its bits say as a number, the line between two powers of two."""
    LN_2: tl.constexpr = 0.6931471805599453
    MARGIN: tl.constexpr = 1e-4  # roundings here add up to 3e-5
    above = ((words ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32) + 0.5  # (1 - u) * 2^24
    bits = above.to(tl.int32, bitcast=True).to(tl.float32)  # (127 + log2) * 2^23
    return tl.fma(bits, -LN_2 / 8388608 + tl.zeros_like(bits), (127 + 24) * LN_2 + MARGIN)


@triton.jit
def gumbel_noise_kernel(seeds_ptr, positions_ptr, noise_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
    tl.store(noise_ptr + row * vocab_size + ids, gumbel(words), mask=ids < vocab_size)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """For int64 `seeds`, `positions` [B] and every id: float32 [B, vocab_size]."""
    noise = torch.empty(seeds.shape[0], vocab_size, dtype=torch.float32, device=seeds.device)
    if seeds.shape[0]:
        gumbel_noise_kernel[(seeds.shape[0], triton.cdiv(vocab_size, _BLOCK))](
            *(seeds, positions, noise, vocab_size),
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    return noise
