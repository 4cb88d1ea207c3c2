"""Root mean square normalisation (Zhang and Sennrich, 2019), with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES
from kernels.reduce import tree_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise x (+ residual) [M, H], scale by `weight` [H]: (normed, residual), both [M, H] in x.dtype.

    The answered residual is x + residual rounded to x.dtype, or x itself without one. As in
    transformers' Llama: statistics in float32, rounded to x.dtype, then multiplied by the weight
    (of x.dtype). x and residual may be views with a row stride.
    """
    if x.is_cuda:
        from kernels.gpu.norm import rms_norm as on_gpu

        return on_gpu(x, weight, eps, residual)
    library = native()
    if library is None:
        return rms_norm_reference(x, weight, eps, residual)
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    assert weight.shape == (width,)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    y = torch.empty(num_rows, width, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(y)
    library.rms_norm(
        *(x.data_ptr(), x.stride(0)),
        *((None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
        *(weight.data_ptr(), eps, num_rows, width, total.data_ptr(), y.data_ptr(), DTYPES[x.dtype]),
    )
    return y, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    mean = tree_sum(wide * wide, dim=-1) / wide.shape[-1]
    normed = wide * (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)
    return weight * normed.to(x.dtype), total
