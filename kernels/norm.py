"""Root mean square normalisation (Zhang and Sennrich, 2019), with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reduce import tree_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise x (+ residual) [M, H], scale by `weight` [H]: (normed, residual), both [M, H] in x.dtype.

    The answered residual is x + residual rounded to x.dtype, or x itself without one. As in
    transformers' Llama: statistics in float32, rounded to x.dtype, then multiplied by the weight.
    """
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    mean = tree_sum(wide * wide, dim=-1) / wide.shape[-1]
    normed = wide * (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)
    return weight * normed.to(x.dtype), total
