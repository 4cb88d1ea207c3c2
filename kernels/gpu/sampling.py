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
from kernels.gpu.threshold import GREEDY_BELOW, KEY_OF_MINUS_INFINITY, LOWEST, allowed_block, key_of, threshold_kernel

#: Ids of rows that have no token.
NOT_FINITE, NONE_ALLOWED = -1, -2

_PICK_BLOCK = 4096
#: Lanes of `threshold_kernel`: what they hold takes 118 of 128 registers; of twice as many, a part would be spilled.
_THRESHOLD_BLOCK = 4096

_BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def pick_kernel(
    logits_ptr,
    words_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    lowest_ptr,
    last_id_ptr,
    best_ptr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
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
    x = allowed_block(logits_ptr + row * VOCAB, words_ptr, row * WORDS, ids, inside)
    broken = (x != x) | (x == float("inf"))
    if temperature >= GREEDY_BELOW:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
        key = key_of(x)
        lowest = tl.load(lowest_ptr + row)
        kept = (key > lowest) | ((key == lowest) & (ids <= tl.load(last_id_ptr + row)))
        noise = gumbel(philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids))
        x = tl.where(kept, x + noise, float("-inf"))
    key = key_of(x)
    key = tl.where(inside, key, LOWEST)
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
    token = tl.where((best >> 32) <= KEY_OF_MINUS_INFINITY, -2, token)
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
    num_parts, num_words = triton.cdiv(vocab_size, _PICK_BLOCK), triton.cdiv(vocab_size, 32)
    assert allowed is None or (allowed.shape == (num_rows, num_words) and allowed.is_contiguous())
    lowest, last_id = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    threshold_kernel[(num_rows,)](
        *(logits, allowed, temperature, top_k, top_p, min_p, lowest, last_id),
        VOCAB=vocab_size,
        WORDS=num_words,
        BLOCK=min(_THRESHOLD_BLOCK, triton.next_power_of_2(vocab_size)),
        PDL=limit.dependent,
        num_warps=16,
        **limit.options,
    )
    pick_kernel[(num_rows, num_parts)](
        *(logits, allowed, temperature, seeds, positions, lowest, last_id, best),
        VOCAB=vocab_size,
        WORDS=num_words,
        BLOCK=min(_PICK_BLOCK, triton.next_power_of_2(vocab_size)),
        PDL=limit.dependent,
        num_warps=8,
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
