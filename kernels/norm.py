"""Root mean square normalisation (Zhang and Sennrich, 2019), with the residual sum before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES
from kernels.reduce import tree_sum


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """What `rms_norm` takes beside rows: `weight` [H], and `eps`."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise x (+ residual) [M, H], scale by `weight` [H]: (normed, residual), both [M, H] in x.dtype.

    The answered residual is x + residual rounded to x.dtype, or x itself without one. Statistics are
    float32. A weight of x.dtype multiplies what was rounded to x.dtype, as in transformers' Llama; a float32
    one multiplies before the one rounding, as in its Gemma. x and residual may be views with a row stride.
    """
    if x.is_cuda:
        from kernels.gpu.norm import rms_norm as on_gpu

        return on_gpu(x, weight, eps, residual)
    library = native()
    if library is None:
        return rms_norm_reference(x, weight, eps, residual)
    num_rows, width = x.shape
    assert x.stride(1) == 1
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.is_contiguous()
    assert weight.shape == (width,)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    y = torch.empty(num_rows, width, dtype=x.dtype)
    total = x if residual is None else torch.empty_like(y)
    library.rms_norm(
        *(x.data_ptr(), x.stride(0)),
        *((None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
        *(weight.data_ptr(), DTYPES[weight.dtype], eps, num_rows, width),
        *(total.data_ptr(), y.data_ptr(), DTYPES[x.dtype]),
    )
    return y, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return _normed(total, weight, eps), total


def head_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of each head of x [M, num_heads, head_dim] by `weight` [head_dim], in place.

    x may be a view with a row stride (a slice of a fused projection).
    """
    library = native()
    if library is None:
        x.copy_(_normed(x, weight, eps))
        return
    num_rows, num_heads, head_dim = x.shape
    assert x.stride()[1:] == (head_dim, 1)
    assert weight.dtype in (x.dtype, torch.float32)
    assert weight.is_contiguous()
    assert weight.shape == (head_dim,)
    library.head_norm(
        *(x.data_ptr(), x.stride(0), num_heads, head_dim, num_rows),
        *(weight.data_ptr(), DTYPES[weight.dtype], eps, DTYPES[x.dtype]),
    )


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean = tree_sum(wide * wide, dim=-1) / wide.shape[-1]
    normed = wide * (1.0 / torch.sqrt(mean + eps)).unsqueeze(-1)
    return (weight * normed.to(weight.dtype)).to(x.dtype)
