"""Functions of single numbers: gated activations of feed-forward layers, the soft cap."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES
from kernels.gate import Activation


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [M, 2 * I], gate in the first half, up in the second: [M, I] in x.dtype.

    The activation is computed in float32 and rounded to x.dtype before the product, as transformers does.
    x may be a view with a row stride.
    """
    if x.is_cuda:
        return _on_gpu(x, Activation.SILU)
    library = native()
    return silu_and_mul_reference(x) if library is None else _by_rows(library.silu_and_mul, x)


def gelu_and_mul(x: Tensor) -> Tensor:
    """`silu_and_mul` with GELU in its form with tanh (Hendrycks and Gimpel, 2016)."""
    if x.is_cuda:
        return _on_gpu(x, Activation.GELU_TANH)
    library = native()
    return gelu_and_mul_reference(x) if library is None else _by_rows(library.gelu_and_mul, x)


def activate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """`silu_and_mul` or `gelu_and_mul`."""
    return silu_and_mul(x) if activation is Activation.SILU else gelu_and_mul(x)


def soft_cap_(x: Tensor, cap: float) -> None:
    """x float32, contiguous, becomes cap * tanh(x / cap), which is near x for small x and within ±cap."""
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    if x.is_cuda:
        from kernels.gpu.activation import soft_cap_ as on_gpu

        return on_gpu(x, cap)
    library = native()
    if library is None:
        x.copy_(soft_capped(x, cap))
    else:
        library.soft_cap(x.data_ptr(), x.numel(), cap)


def _on_gpu(x: Tensor, activation: Activation) -> Tensor:
    from kernels.gpu.activation import activate_and_mul

    return activate_and_mul(x, activation)


def _by_rows(operator: Callable[..., None], x: Tensor) -> Tensor:
    num_rows, width = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    assert x.shape[1] % 2 == 0
    y = torch.empty(num_rows, width, dtype=x.dtype)
    operator(x.data_ptr(), x.stride(0), num_rows, width, y.data_ptr(), DTYPES[x.dtype])
    return y


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    return _logistic_times(wide, wide).to(x.dtype) * up


def gelu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    # x / 2 * (1 + tanh(u)) is x times the logistic function of 2u.
    twice_u = math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return _logistic_times(wide, twice_u).to(x.dtype) * up


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), by exp, whose vector form has the same bits for every lane."""
    return cap * (1.0 - 2.0 / (torch.exp(x * (2.0 / cap)) + 1.0))


def _logistic_times(x: Tensor, exponent: Tensor) -> Tensor:
    # Not torch.sigmoid, silu or gelu: measured, their vector tail gives other bits than the body.
    return x / (1.0 + torch.exp(-exponent))
