"""Logprobs of chosen tokens and of the most likely ones: one program a row, in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.noise import log_normal
from kernels.gpu.threshold import key_of, value_of

_BLOCK = 8192
_ALL = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def packed_block(row_ptr, ids, VOCAB: tl.constexpr):
    """Values and ids as int64 in the order of likelihood."""
    key = key_of(tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")))
    key = tl.where(ids < VOCAB, key, -0x80000000)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def logprobs_kernel(
    logits_ptr,
    ids_ptr,
    own_ptr,
    rank_ptr,
    top_ids_ptr,
    top_ptr,
    k,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * VOCAB
    token = tl.maximum(tl.load(ids_ptr + row), 0)
    own = tl.load(row_ptr + token)
    own_packed = (key_of(own).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ahead = tl.zeros([BLOCK], tl.int32)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")))
        ahead += (packed_block(row_ptr, ids, VOCAB) > own_packed).to(tl.int32)
    highest = tl.max(best, 0)
    total = tl.zeros([1], tl.float64)
    for first in range(0, VOCAB, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
        total += tl.sum(tl.exp(x - highest), 0).to(tl.float64)
    log_total = tl.sum(log_normal(total.to(tl.float32)), 0)
    tl.store(own_ptr + row, (own - highest) - log_total)
    tl.store(rank_ptr + row, tl.sum(ahead, 0) + 1)
    below = tl.full([1], _ALL, tl.int64)
    for place in range(k):
        most = tl.full([BLOCK], -_ALL, tl.int64)
        for first in range(0, VOCAB, BLOCK):
            packed = packed_block(row_ptr, first + tl.arange(0, BLOCK), VOCAB)
            most = tl.maximum(most, tl.where(packed < below, packed, -_ALL))
        found = tl.max(most, 0)
        below = below * 0 + found
        tl.store(top_ids_ptr + row * k + place, 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32))
        tl.store(top_ptr + row * k + place, (value_of((found >> 32).to(tl.int32)) - highest) - log_total)


def logprobs_ahead(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For float32 `logits` [B, V] and int32 `ids` [B] (below 0: no token, any answer): own float32 [B],
    rank int32 [B], top_ids int32 [B, k], top float32 [B, k]."""
    num_rows, vocab_size = logits.shape
    own = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    top_ids = torch.empty(num_rows, k, dtype=torch.int32, device=logits.device)
    top = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    if num_rows:
        limit = limits(logits.device)
        logprobs_kernel[(num_rows,)](
            *(logits, ids, own, rank, top_ids, top, k),
            VOCAB=vocab_size,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
            PDL=limit.dependent,
            num_warps=16,
            **limit.options,
        )
    return own, rank, top_ids, top
