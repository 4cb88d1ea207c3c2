"""Matrix products by what is fastest for their shape in the mode in force: `kernels.gpu.matmul`'s tiles and library,
`kernels.gpu.held` for few rows by small weights, or `kernels.gpu.vector` for single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.gate import Activation
from kernels.gpu import held, matmul, vector
from kernels.gpu.mode import in_force
from kernels.gpu.norm import rms_norm

if TYPE_CHECKING:
    from kernels.norm import RowNorm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `kernels.gpu.matmul.linear`."""
    columns = held.columns_of(x, len(weight), gated=False)
    if columns is not None:
        return held.multiply(x, weight, bias, out_dtype, columns=columns)
    if _by_sums(x, len(weight)):
        return vector.multiply(x, weight, bias, out_dtype)
    return matmul.linear(x, weight, bias, out_dtype)


def add_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
    """See `kernels.gpu.matmul.add_linear`."""
    columns = held.columns_of(x, len(weight), gated=False)
    if columns is not None:
        return held.multiply(x, weight, bias, x.dtype, columns=columns, residual=residual)
    if _by_sums(x, len(weight)):
        return vector.multiply(x, weight, bias, x.dtype, residual=residual)
    return matmul.add_linear(x, weight, bias, residual)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = Activation.SILU) -> Tensor:
    """See `kernels.gpu.matmul.gated_linear`."""
    columns = held.columns_of(x, len(weight) // 2, gated=True)
    if columns is not None:
        return held.multiply(x, weight, bias, x.dtype, columns=columns, gate=activation)
    if _by_sums(x, len(weight) // 2):
        return vector.multiply(x, weight, bias, x.dtype, gate=activation)
    return matmul.gated_linear(x, weight, bias, activation)


def normed_linear(x: Tensor, norm: RowNorm, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of the `rms_norm` of x."""
    columns = _columns_after_norm(x, len(weight), gated=False)
    if columns is not None:
        return held.multiply(x, weight, bias, x.dtype, columns=columns, norm=norm)
    return linear(rms_norm(x, norm.weight, norm.eps, None)[0], weight, bias, x.dtype)


def normed_gated_linear(
    x: Tensor, norm: RowNorm, weight: Tensor, bias: Tensor | None, activation: Activation = Activation.SILU
) -> Tensor:
    """`gated_linear` of the `rms_norm` of x."""
    columns = _columns_after_norm(x, len(weight) // 2, gated=True)
    if columns is not None:
        return held.multiply(x, weight, bias, x.dtype, columns=columns, gate=activation, norm=norm)
    return gated_linear(rms_norm(x, norm.weight, norm.eps, None)[0], weight, bias, activation)


def _columns_after_norm(x: Tensor, num_out: int, *, gated: bool) -> int | None:
    return held.columns_of(x, num_out, gated=gated, normed=True) if len(x) == 1 else None


def _by_sums(x: Tensor, num_out: int) -> bool:
    return in_force().sums_single_rows and vector.is_fastest(x, num_out)
