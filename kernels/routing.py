"""Which experts of a mixture a row goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import native


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each row by its `logits` (float32 [M, num_experts]) and their weights.

    Both answers are [M, top_k], int32 and float32, the largest logit first, equal ones by number. Weights are the
    softmax over all experts, with `renormalize` over those chosen. A NaN counts as largest and makes all weights NaN.
    """
    num_rows, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts} for {num_experts} experts, got {top_k}.")
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    if logits.is_cuda:
        from kernels.gpu.routing import route as on_gpu

        return on_gpu(logits, top_k, renormalize=renormalize)
    library = native()
    if library is None:
        return route_reference(logits, top_k, renormalize=renormalize)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32)
    library.route(
        *(logits.data_ptr(), num_rows, num_experts, top_k, renormalize), *(chosen.data_ptr(), weights.data_ptr())
    )
    return chosen, weights


def route_reference(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    ordered, experts = logits.sort(dim=1, descending=True, stable=True)
    exponentials = torch.exp(ordered - ordered[:, :1])
    weights = exponentials[:, :top_k]
    total = (weights if renormalize else exponentials).sum(dim=1, keepdim=True)
    return experts[:, :top_k].to(torch.int32), weights / total
