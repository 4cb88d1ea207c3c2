"""Matrix products as the mode in force has them: `kernels.gpu.matmul`'s, or single rows by `kernels.gpu.vector`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gate import Activation
from kernels.gpu import matmul, vector
from kernels.gpu.mode import in_force


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `kernels.gpu.matmul.linear`."""
    if _by_sums(x, len(weight)):
        return vector.multiply(x, weight, bias, out_dtype)
    return matmul.linear(x, weight, bias, out_dtype)


def add_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
    """See `kernels.gpu.matmul.add_linear`."""
    if _by_sums(x, len(weight)):
        return vector.multiply(x, weight, bias, x.dtype, residual=residual)
    return matmul.add_linear(x, weight, bias, residual)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = Activation.SILU) -> Tensor:
    """See `kernels.gpu.matmul.gated_linear`."""
    if _by_sums(x, len(weight) // 2):
        return vector.multiply(x, weight, bias, x.dtype, gate=activation)
    return matmul.gated_linear(x, weight, bias, activation)


def _by_sums(x: Tensor, num_out: int) -> bool:
    return in_force().sums_single_rows and vector.is_fastest(x, num_out)
