"""The choice of experts: one row a program, so that a row's sum has one launch shape."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait


@triton.jit
def route_kernel(
    logits_ptr,
    chosen_ptr,
    weights_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    left = expert < NUM_EXPERTS
    wait(PDL)
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=left, other=float("-inf"))
    ranks = tl.where(logits == logits, logits, float("inf"))  # NaN before all
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    picked = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        highest = tl.max(tl.where(left, ranks, float("-inf")), 0)
        best = tl.min(tl.where(left & (ranks == highest), expert, BLOCK), 0)
        value = tl.sum(tl.where(expert == best, logits, 0.0), 0)  # one term and zeros: exact
        chosen = tl.where(place == k, best, chosen)
        picked = tl.where(place == k, value, picked)
        left = left & (expert != best)
    top = tl.sum(tl.where(place == 0, picked, 0.0), 0)
    weights = tl.exp(picked - top)
    exponentials = tl.where(expert < NUM_EXPERTS, tl.exp(logits - top), 0.0)
    total = tl.sum(tl.where(place < TOP_K, weights, 0.0), 0) if RENORMALIZE else tl.sum(exponentials, 0)
    tl.store(chosen_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights / total, mask=place < TOP_K)


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `kernels.routing.route`: float32 [M, num_experts] → int32 and float32 [M, top_k]."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        limit = limits(logits.device)
        route_kernel[(num_rows,)](
            *(logits, chosen, weights),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            BLOCK=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            PDL=limit.dependent,
            num_warps=1,
            **limit.options,
        )
    return chosen, weights
