"""Gated activations, the soft cap: element by element, so any launch shape gives the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gate import Activation
from kernels.gpu.launch import begin, limits, wait

_BLOCK = 1024


#: GELU with tanh, x / 2 * (1 + tanh(u)), is x times the logistic function of 2u = x (LINEAR + CUBIC x²).
LINEAR = tl.constexpr(math.sqrt(8 / math.pi))
CUBIC = tl.constexpr(math.sqrt(8 / math.pi) * 0.044715)


@triton.jit
def active_times(gate, up, GELU: tl.constexpr, T: tl.constexpr):
    """gelu(gate) or silu(gate), times up, of float32 operands, each rounded to T first, as if they came from memory."""
    gate = gate.to(T).to(tl.float32)
    exponent = gate
    if GELU:
        exponent = gate * tl.fma(gate * gate, CUBIC, LINEAR)
    active = (gate / (1.0 + tl.exp(-exponent))).to(T).to(tl.float32)
    return (active * up.to(T).to(tl.float32)).to(T)


@triton.jit
def activate_and_mul_kernel(
    x_ptr, y_ptr, x_stride, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait(PDL)
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + column, active_times(gate, up, GELU, y_ptr.dtype.element_ty), mask=inside)


def activate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """See `kernels.activation.activate_and_mul`: [M, 2 * I] → [M, I]."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    limit = limits(x.device)
    activate_and_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        *(x, y, x.stride(0)),
        WIDTH=width,
        GELU=activation is Activation.GELU_TANH,
        BLOCK=_BLOCK,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
    return y


@triton.jit(do_not_specialize=["count"])
def soft_cap_kernel(x_ptr, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wait(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0)), mask=inside)


def soft_cap_(x: Tensor, cap: float) -> None:
    """See `kernels.activation.soft_cap_`."""
    if x.numel() == 0:
        return
    limit = limits(x.device)
    soft_cap_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
        *(x, x.numel(), cap), BLOCK=_BLOCK, PDL=limit.dependent, num_warps=4, **limit.options
    )
