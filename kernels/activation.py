"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [M, 2 * I], gate in the first half, up in the second: [M, I] in x.dtype.

    silu is computed in float32 and rounded to x.dtype before the product, as transformers does.
    x may be a view with a row stride.
    """
    if x.is_cuda:
        from kernels.gpu.activation import silu_and_mul as on_gpu

        return on_gpu(x)
    library = native()
    if library is None:
        return silu_and_mul_reference(x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    assert x.shape[1] % 2 == 0
    y = torch.empty(num_rows, width, dtype=x.dtype)
    library.silu_and_mul(x.data_ptr(), x.stride(0), num_rows, width, y.data_ptr(), DTYPES[x.dtype])
    return y


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    # Not torch.sigmoid or silu: measured, their vector tail gives other bits than the body.
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype) * up
