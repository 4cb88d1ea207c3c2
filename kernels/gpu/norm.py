"""RMS norm: one program a row, always four warps, so that a row's sum has one order."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait


@triton.jit
def normed(x, scale, weight, T: tl.constexpr):
    """x * scale times the weight, rounded to T; rounded to T before that too where the weight is of type T.

    x and scale are float32.
    """
    y = x * scale
    if weight.dtype == T:
        y = y.to(T).to(tl.float32)
    return (y * weight.to(tl.float32)).to(T)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    y_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    T: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(T)
        tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / WIDTH, eps))
    tl.store(y_ptr + row * WIDTH + column, normed(x, scale, weight, T), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kernels.norm.rms_norm`: x (and residual) [M, H], weight [H] → (normed, x + residual)."""
    num_rows, width = x.shape
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    if num_rows == 0:
        return y, total
    limit = limits(x.device)
    other = x if residual is None else residual
    rms_norm_kernel[(num_rows,)](
        *(x, other, weight, total, y, x.stride(0), other.stride(0), eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=residual is not None,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
    return y, total
