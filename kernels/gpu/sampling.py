"""Picking tokens from logits, without sorting them.

`threshold_kernel` finds for a row with top_k, top_p or min_p the value and, among its equals, the id
down to which tokens are kept; `pick_kernel` takes the best noisy value of each part of the
vocabulary, `choose_kernel` the best of the parts. A value and its id are one int64 whose order is
that of the values, equals by lowest id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.noise import gumbel, philox_words

#: Ids of rows that have no token.
NOT_FINITE, NONE_ALLOWED = -1, -2

_GREEDY_BELOW = tl.constexpr(1e-5)
_PICK_BLOCK = 4096
_THRESHOLD_BLOCK = 8192

_LOWEST = tl.constexpr(-0x80000000)
_BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


@triton.jit
def key_of(x):
    """int32 in the order of float32 x; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled_block(row_ptr, ids, inside, temperature):
    x = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def count_from(row_ptr, lowest, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys are at least `lowest`."""
    count = 0
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row_ptr, ids, ids < VOCAB, temperature))
        count += tl.sum(((key >= lowest) & (ids < VOCAB)).to(tl.int32), 0)
    return count


@triton.jit
def weight_above(row_ptr, bound, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp(value - top) over keys above `bound`, in float64 over blocks of float32 sums."""
    total = tl.zeros([1], tl.float64)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = scaled_block(row_ptr, ids, ids < VOCAB, temperature)
        weights = tl.where(key_of(x) > bound, tl.exp(x - top), 0.0)
        total += tl.sum(weights, 0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def middle(low, high):
    """Between two int32, rounded down, without overflow."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def key_of_rank(row_ptr, rank, low, high, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from low to high that at least `rank` keys reach."""
    while low < high:
        at = middle(low, high) + 1
        if count_from(row_ptr, at, temperature, VOCAB, BLOCK) >= rank:
            low = at
        else:
            high = at - 1
    return low


@triton.jit
def key_of_weight(row_ptr, target, low, high, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The least key above low, at most high, above which the weight is less than `target`."""
    while low + 1 < high:
        at = middle(low, high)
        if weight_above(row_ptr, at, top, temperature, VOCAB, BLOCK) < target:
            high = at
        else:
            low = at
    return high


@triton.jit
def key_of_min_p(min_p, low, high, top):
    """The least key above low, at most high, whose own weight is at least `min_p`."""
    while low + 1 < high:
        at = middle(low, high)
        if tl.exp(value_of(at) - top) >= min_p:
            high = at
        else:
            low = at
    return high


@triton.jit
def id_of_tie(row_ptr, bound, ties, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of the lowest `ties` ids whose key is `bound`."""
    seen = 0
    last = 0
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        key = key_of(scaled_block(row_ptr, ids, ids < VOCAB, temperature))
        equal = (key == bound) & (ids < VOCAB)
        place = seen + tl.cumsum(equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(equal & (place <= ties), ids, 0), 0))
        seen = tl.max(place, 0)
    return last


@triton.jit
def kept_by_nucleus(row_ptr, top_p, bound, ties, highest, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(bound, ties) narrowed to the fewest tokens whose weight reaches `top_p` of what they kept before."""
    weight = tl.exp(value_of(bound) - top).to(tl.float64)
    above = weight_above(row_ptr, bound, top, temperature, VOCAB, BLOCK)
    equals = tl.minimum(
        count_from(row_ptr, bound, temperature, VOCAB, BLOCK)
        - count_from(row_ptr, bound + 1, temperature, VOCAB, BLOCK),
        ties,
    )
    target = (above + equals.to(tl.float64) * weight) * top_p.to(tl.float64)
    if above >= target:
        bound = key_of_weight(row_ptr, target, bound, highest, top, temperature, VOCAB, BLOCK)
        ties = highest * 0 + VOCAB
        above = weight_above(row_ptr, bound, top, temperature, VOCAB, BLOCK)
        weight = tl.exp(value_of(bound) - top).to(tl.float64)
    room = tl.maximum(tl.ceil((target - above) / tl.maximum(weight, 1e-300)), 1.0)
    return bound, tl.minimum(ties.to(tl.float64), room).to(tl.int32)


@triton.jit
def threshold_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lowest_ptr,
    last_id_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """lowest[row], last_id[row]: a token is kept whose key is above `lowest`, or equal with an id up to `last_id`."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limited = (top_k >= 1) & (top_k < VOCAB)
    wait(PDL)
    tl.store(lowest_ptr + row, _LOWEST)
    tl.store(last_id_ptr + row, VOCAB)
    if (temperature < _GREEDY_BELOW) | ~(limited | (top_p < 1.0) | (min_p > 0.0)):
        return
    row_ptr = logits_ptr + row * VOCAB
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, scaled_block(row_ptr, ids, ids < VOCAB, temperature))
    top = tl.max(best, 0)
    highest = key_of(top)
    # The lowest kept key, and how many of its equals stay (VOCAB: all).
    bound = highest * 0 + _KEY_OF_MINUS_INFINITY
    ties = highest * 0 + VOCAB
    if limited:
        bound = key_of_rank(row_ptr, top_k, bound, highest, temperature, VOCAB, BLOCK)
        ties = top_k - count_from(row_ptr, bound + 1, temperature, VOCAB, BLOCK)
    if top_p < 1.0:
        bound, ties = kept_by_nucleus(row_ptr, top_p, bound, ties, highest, top, temperature, VOCAB, BLOCK)
    if min_p > 0.0:
        enough = key_of_min_p(min_p, bound - 1, highest, top)
        ties = tl.where(enough > bound, VOCAB, ties)
        bound = tl.maximum(enough, bound)
    tl.store(lowest_ptr + row, bound)
    if ties < VOCAB:
        tl.store(last_id_ptr + row, id_of_tie(row_ptr, bound, ties, temperature, VOCAB, BLOCK))


@triton.jit
def pick_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    lowest_ptr,
    last_id_ptr,
    best_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    temperature = tl.load(temperature_ptr + row)
    wait(PDL)
    x = tl.load(logits_ptr + row * VOCAB + ids, mask=inside, other=float("-inf"))
    broken = (x != x) | (x == float("inf"))
    if temperature >= _GREEDY_BELOW:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
        key = key_of(x)
        lowest = tl.load(lowest_ptr + row)
        kept = (key > lowest) | ((key == lowest) & (ids <= tl.load(last_id_ptr + row)))
        noise = gumbel(philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids))
        x = tl.where(kept, x + noise, float("-inf"))
    key = key_of(x)
    key = tl.where(inside, key, _LOWEST)
    packed = (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    packed = tl.where(broken, _BROKEN, packed)
    tl.store(best_ptr + row * tl.num_programs(1) + part, tl.max(packed, 0))


@triton.jit
def choose_kernel(
    best_ptr, slots_ptr, ids_ptr, last_ids_ptr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    wait(PDL)
    best = tl.load(best_ptr + row * NUM_PARTS + part, mask=part < NUM_PARTS, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(best, 0)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    token = tl.where((best >> 32) <= _KEY_OF_MINUS_INFINITY, -2, token)
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
) -> Tensor:
    """A token for each row of float32 `logits` [B, V]: int32 [B], NOT_FINITE or NONE_ALLOWED where there is none.

    `temperature`, `top_p`, `min_p` float32, `top_k`, `positions`, `slots` int32, `seeds` int64, all [B]. The
    token is kept in last_ids[slot] as well, int32 [num_slots], unless the slot is below 0.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return ids
    limit = limits(logits.device)
    num_parts = triton.cdiv(vocab_size, _PICK_BLOCK)
    lowest, last_id = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    threshold_kernel[(num_rows,)](
        *(logits, temperature, top_k, top_p, min_p, lowest, last_id),
        VOCAB=vocab_size,
        BLOCK=min(_THRESHOLD_BLOCK, triton.next_power_of_2(vocab_size)),
        PDL=limit.dependent,
        num_warps=16,
        enable_fp_fusion=False,
        **limit.options,
    )
    pick_kernel[(num_rows, num_parts)](
        *(logits, temperature, seeds, positions, lowest, last_id, best),
        VOCAB=vocab_size,
        BLOCK=min(_PICK_BLOCK, triton.next_power_of_2(vocab_size)),
        PDL=limit.dependent,
        num_warps=8,
        enable_fp_fusion=False,
        **limit.options,
    )
    choose_kernel[(num_rows,)](
        *(best, slots, ids, last_ids),
        NUM_PARTS=num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        PDL=limit.dependent,
        num_warps=1,
        **limit.options,
    )
    return ids
