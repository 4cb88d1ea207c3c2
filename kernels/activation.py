"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [M, 2 * I], gate in the first half, up in the second: [M, I] in x.dtype.

    silu is computed in float32 and rounded to x.dtype before the product, as transformers does.
    """
    return silu_and_mul_reference(x)


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.to(torch.float32)
    # Not torch.sigmoid or silu: measured, their vector tail gives other bits than the body.
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype) * up
