"""Picking tokens from logits, without sorting them.

`threshold_kernel` finds for a row with top_k, top_p or min_p the value and, among its equals, the id
down to which tokens are kept. Exact noise is two logarithms for each id, so `bound_kernel` only bounds the best noisy
value of each part of the vocabulary, which takes a third of the instructions, and `choose_kernel` looks for it in the
parts that may have it: seldom more than one. A value and its id are one int64 whose order is that of the values,
equals by lowest id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.noise import gumbel, gumbel_bound, philox_words
from kernels.gpu.threshold import (
    GREEDY_BELOW,
    KEY_OF_MINUS_INFINITY,
    LOWEST,
    allowed_block,
    key_of,
    threshold_kernel,
    value_of,
)

#: Ids of rows that have no token.
NOT_FINITE, NONE_ALLOWED = -1, -2

#: Ids of a part. Twice as many take `choose_kernel` 1 us longer for one row, 4 us for 256, and `bound_kernel` no less.
_PART = 1024
#: Lanes of `threshold_kernel`: what they hold takes 118 of 128 registers; of twice as many, a part would be spilled.
_THRESHOLD_BLOCK = 4096

_BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_UNKNOWN = tl.constexpr(0x7FFFFFFE)  # above the key of any number
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SMALLEST = tl.constexpr(1e-37)  # what has fewer bits than a float32 is below
_MARGIN = tl.constexpr(9.5367431640625e-07)  # 2^-20, relative: several roundings


@triton.jit
def packed(key, ids):
    """int64 in the order of keys, equals by lowest id."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def id_of(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def least_logit(lowest, temperature):
    """A logit that is not above any whose key, divided by the temperature, is at least `lowest`."""
    value = tl.minimum(value_of(tl.maximum(lowest, KEY_OF_MINUS_INFINITY)), _LARGEST)
    return value * (temperature * tl.where(value > 0.0, 1.0 - _MARGIN, 1.0 + _MARGIN)) - _SMALLEST


@triton.jit
def bound_kernel(
    logits_ptr,
    words_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    lowest_ptr,
    bounds_ptr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """bounds[row, part]: packed, what no value of the part is above, noise included, and the part's first id."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    wait(PDL)
    x = allowed_block(logits_ptr + row * VOCAB, words_ptr, row * WORDS, ids, ids < VOCAB)
    x = tl.minimum(x, float("inf"))  # which NaN becomes
    noisy = temperature >= GREEDY_BELOW
    if noisy:
        lowest = tl.load(lowest_ptr + row)
        if (words_ptr is not None) | (lowest > KEY_OF_MINUS_INFINITY):
            x = tl.where(x >= least_logit(lowest, temperature), x, float("-inf"))
            noisy = tl.max(x, 0) > float("-inf")
    if noisy:
        scale = 1 / temperature + tl.zeros_like(x)
        bound = tl.max(tl.fma(x, scale, gumbel_bound(philox_words(seed, position, ids))), 0)
        bound = tl.maximum(bound, -_LARGEST)
        bound += tl.abs(bound) * _MARGIN + 20 * _MARGIN
    else:
        bound = tl.max(x, 0)
    key = tl.where(bound < float("inf"), key_of(bound), _UNKNOWN)
    tl.store(bounds_ptr + row * tl.num_programs(1) + part, packed(key, part * PART))


@triton.jit
def best_of_part(row, noise, kept, first, VOCAB: tl.constexpr, PART: tl.constexpr):
    """The best value of PART ids from `first` on and its id, packed, or _BROKEN. `row` is that of `scaled_block`,
    `noise` (seed, position), `kept` what `threshold_kernel` found."""
    ids = tl.multiple_of(first, 32) + tl.arange(0, PART)
    inside = ids < VOCAB
    x = allowed_block(row[0], row[1], row[2], ids, inside)
    broken = (x != x) | (x == float("inf"))
    if row[3] >= GREEDY_BELOW:
        x = tl.div_rn(x, row[3] + tl.zeros_like(x))
        key = key_of(x)
        is_kept = (key > kept[0]) | ((key == kept[0]) & (ids <= kept[1]))
        x = tl.where(is_kept, x + gumbel(philox_words(noise[0], noise[1], ids)), float("-inf"))
    key = tl.where(inside, key_of(x), LOWEST)
    return tl.max(tl.where(broken, _BROKEN, packed(key, ids)), 0)


@triton.jit
def choose_kernel(
    logits_ptr,
    words_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    lowest_ptr,
    last_id_ptr,
    bounds_ptr,
    slots_ptr,
    ids_ptr,
    last_ids_ptr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Looks into parts, that of the highest bound first, until no other can have a better value or an equal of lower
    id."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    of_row = (logits_ptr + row * VOCAB, words_ptr, row * WORDS, tl.load(temperature_ptr + row))
    noise = (tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    slot = tl.load(slots_ptr + row)
    part = tl.arange(0, BLOCK)
    wait(PDL)
    kept = (tl.load(lowest_ptr + row), tl.load(last_id_ptr + row))
    bounds = tl.load(bounds_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=_NOTHING)
    bound = tl.max(bounds, 0)
    best = tl.full([], _NOTHING, tl.int64)
    while bound > best:
        best = tl.maximum(best, best_of_part(of_row, noise, kept, id_of(bound), VOCAB, PART))
        bounds = tl.where(bounds == bound, _NOTHING, bounds)
        bound = tl.max(bounds, 0)
    token = tl.where((best >> 32) <= KEY_OF_MINUS_INFINITY, -2, id_of(best))
    token = tl.where(best == _BROKEN, -1, token)
    tl.store(ids_ptr + row, token)
    tl.store(last_ids_ptr + slot, tl.maximum(token, 0), mask=slot >= 0)


def sample_ahead(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slots: Tensor,
    last_ids: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """A token for each row of float32 `logits` [B, V]: int32 [B], NOT_FINITE or NONE_ALLOWED where there is none.

    `temperature`, `top_p`, `min_p` float32, `top_k`, `positions`, `slots` int32, `seeds` int64, all [B]. The
    token is kept in last_ids[slot] as well, int32 [num_slots], unless the slot is below 0. `allowed` int32
    [B, ceil(V / 32)] has a bit for each id, the lowest first: `kernels.sampling.mask_logits` says what it does.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return ids
    limit = limits(logits.device)
    part = min(_PART, triton.next_power_of_2(vocab_size))
    num_parts, num_words = triton.cdiv(vocab_size, part), triton.cdiv(vocab_size, 32)
    assert allowed is None or (allowed.shape == (num_rows, num_words) and allowed.is_contiguous())
    lowest, last_id = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    bounds = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    of_rows = (logits, allowed, temperature, seeds, positions, lowest)
    threshold_kernel[(num_rows,)](
        *(logits, allowed, temperature, top_k, top_p, min_p, lowest, last_id),
        VOCAB=vocab_size,
        WORDS=num_words,
        BLOCK=min(_THRESHOLD_BLOCK, triton.next_power_of_2(vocab_size)),
        PDL=limit.dependent,
        num_warps=16,
        **limit.options,
    )
    bound_kernel[(num_rows, num_parts)](
        *(*of_rows, bounds),
        VOCAB=vocab_size,
        WORDS=num_words,
        PART=part,
        PDL=limit.dependent,
        num_warps=2,
        **limit.options,
    )
    choose_kernel[(num_rows,)](
        *(*of_rows, last_id, bounds, slots, ids, last_ids),
        VOCAB=vocab_size,
        WORDS=num_words,
        PART=part,
        NUM_PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        PDL=limit.dependent,
        num_warps=8,
        **limit.options,
    )
    return ids
