"""Matrix product with packed weights: y = x W^T + b.

Contract: an element of the result is one chain of fused multiply-adds in float32 over the inputs
in order, the bias added at the end, rounded once to the result's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import activate_and_mul
from kernels.backend import native
from kernels.cpu import pages
from kernels.cpu.library import DTYPES
from kernels.gate import Activation
from kernels.norm import RowNorm, rms_norm

#: Output columns side by side in a panel of the native layout.
PANEL = 16

_REFERENCE_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [N, K] in the layout that `linear` reads. Opaque but for `shape`, `dtype`, `rows`."""

    data: Tensor  # native: [ceil(N / 16), K, 16] in dtype; reference: float32 [N, K]; GPU: [N, K] in dtype
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def in_panels(self) -> bool:
        return self.data.dim() == 3

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [M] of the weight, as [M, K] in its dtype: the embedding of a tied head.

        Raises IndexError for an id outside the weight.
        """
        ids = ids.long()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            raise IndexError(f"ids must be in 0..{self.shape[0] - 1}, got {int(ids.min())}..{int(ids.max())}.")
        if self.in_panels:
            return self.data[ids // PANEL, :, ids % PANEL]
        return self.data[ids].to(self.dtype)


def pack_linear(*weights: Tensor) -> PackedLinear:
    """Pack `weights` [N, K] (float32, bfloat16 or float16), one below the other, for `linear`. On a CPU they are
    copied, so drop the originals.
    """
    dtype, num_in = weights[0].dtype, weights[0].shape[-1]
    for weight in weights:
        if weight.dim() != 2 or weight.dtype not in DTYPES:
            raise ValueError(
                f"a linear weight must be float32, bfloat16 or float16 of shape [out, in], "
                f"got {weight.dtype} {tuple(weight.shape)}."
            )
        if (weight.dtype, weight.shape[1]) != (dtype, num_in):
            raise ValueError(
                f"weights packed together must have one dtype and one number of inputs, got {dtype} with {num_in} and "
                f"{weight.dtype} with {weight.shape[1]}."
            )
    num_out = sum(weight.shape[0] for weight in weights)
    if weights[0].is_cuda:
        return PackedLinear(_below_each_other(weights).contiguous(), (num_out, num_in), dtype)
    if native() is None:
        return PackedLinear(_below_each_other(weights).to(torch.float32).contiguous(), (num_out, num_in), dtype)
    panels = pages.zeros((-(-num_out // PANEL), num_in, PANEL), dtype)
    fill_panels(panels, *weights)
    return PackedLinear(panels, (num_out, num_in), dtype)


def fill_panels(panels: Tensor, *weights: Tensor) -> None:
    """Copy `weights` [N, K], one below the other, into `panels` [ceil(sum of N / 16), K, 16], which are zeros: the
    native layout.
    """
    library = native()
    assert library is not None, "the layout is that of the native operators"
    first = 0
    for weight in weights:
        whole = weight.contiguous()
        library.pack(whole.data_ptr(), whole.element_size(), *whole.shape, panels.data_ptr(), first)
        first += whole.shape[0]


def _below_each_other(weights: tuple[Tensor, ...]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def linear(
    x: Tensor, packed: PackedLinear, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K] times the packed weight [N, K] transposed, plus `bias` [N]: [M, N] in `out_dtype` (default x.dtype).

    x may be a view with a row stride; its last dimension must be contiguous.
    """
    num_out, num_in = packed.shape
    if x.dim() != 2 or x.shape[1] != num_in:
        raise ValueError(f"x must be [rows, {num_in}] for a weight {packed.shape}, got {tuple(x.shape)}.")
    if x.is_cuda:
        from kernels.gpu.products import linear as on_gpu

        assert x.dtype == packed.dtype
        return on_gpu(x, packed.data, bias, out_dtype or x.dtype)
    if not packed.in_panels:
        return linear_reference(x, packed.data, bias).to(out_dtype or x.dtype)
    library = native()
    if library is None:
        raise RuntimeError("the weight was packed for the native operators, which are no longer in force.")
    assert x.stride(1) == 1
    y = torch.empty(x.shape[0], num_out, dtype=out_dtype or x.dtype)
    wide_bias = None if bias is None else bias.to(torch.float32).contiguous()
    library.linear(
        *(x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.shape[0], num_in),
        *(packed.data.data_ptr(), DTYPES[packed.dtype], None if wide_bias is None else wide_bias.data_ptr()),
        *(num_out, y.data_ptr(), DTYPES[y.dtype]),
    )
    return y


def gated_linear(
    x: Tensor, packed: PackedLinear, bias: Tensor | None = None, activation: Activation = Activation.SILU
) -> Tensor:
    """`activate_and_mul` of `linear`, in one pass where the device has one: x [M, K] → [M, N / 2] in x.dtype.

    The first half of the weight's rows [N, K] is the gate.
    """
    if x.is_cuda:
        from kernels.gpu.products import gated_linear as on_gpu

        assert x.dtype == packed.dtype
        return on_gpu(x, packed.data, bias, activation)
    return activate_and_mul(linear(x, packed, bias), activation)


def add_linear(x: Tensor, packed: PackedLinear, bias: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
    """`linear`, to be added to `residual` [M, N]: (product, residual), or (None, their sum) where adding is free.

    `rms_norm` takes either and gives the same bits: the product is rounded before it is added.
    """
    if x.is_cuda:
        from kernels.gpu.products import add_linear as on_gpu

        assert x.dtype == packed.dtype
        total = on_gpu(x, packed.data, bias, residual)
        if total is not None:
            return None, total
    return linear(x, packed, bias), residual


def normed_linear(x: Tensor, norm: RowNorm, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """`linear` of `rms_norm`, in one pass where the device has one: x [M, K] → [M, N] in x.dtype."""
    if x.is_cuda:
        from kernels.gpu.products import normed_linear as on_gpu

        assert x.dtype == packed.dtype
        return on_gpu(x, norm, packed.data, bias)
    return linear(rms_norm(x, norm.weight, norm.eps)[0], packed, bias)


def normed_gated_linear(
    x: Tensor,
    norm: RowNorm,
    packed: PackedLinear,
    bias: Tensor | None = None,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """`gated_linear` of `rms_norm`, in one pass where the device has one: x [M, K] → [M, N / 2] in x.dtype."""
    if x.is_cuda:
        from kernels.gpu.products import normed_gated_linear as on_gpu

        assert x.dtype == packed.dtype
        return on_gpu(x, norm, packed.data, bias, activation)
    return gated_linear(rms_norm(x, norm.weight, norm.eps)[0], packed, bias, activation)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [M, N]. The product is called with 8 rows each time, the last ones padded.

    The library chooses kernels and their order of additions by the number of rows (measured: padding
    to multiples of 4 or 8 is enough with AVX2, not with AVX-512) and by the number of threads.
    """
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -num_rows % _REFERENCE_ROWS))
    y = padded.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        torch.matmul(padded[rows], weight.t(), out=y[rows])
    y = y[:num_rows]
    return y if bias is None else y + bias.to(torch.float32)
