"""Matrix product with packed weights: y = x W^T + b.

Contract: an element of the result is one chain of fused multiply-adds in float32 over the inputs
in order, the bias added at the end, rounded once to the result's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [N, K] in the layout that `linear` reads. Opaque but for `shape`, `dtype`, `rows`."""

    data: Tensor  # reference: float32 [N, K]
    shape: tuple[int, int]
    dtype: torch.dtype

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [M] of the weight, as [M, K] in its dtype: the embedding of a tied head."""
        return self.data.index_select(0, ids.long()).to(self.dtype)


def pack_linear(weight: Tensor) -> PackedLinear:
    """Pack `weight` [N, K] (float32, bfloat16 or float16) for `linear`. It is copied, so drop the original."""
    if weight.dim() != 2 or weight.dtype not in _FLOATS:
        raise ValueError(
            f"a linear weight must be float32, bfloat16 or float16 of shape [out, in], "
            f"got {weight.dtype} {tuple(weight.shape)}."
        )
    num_out, num_in = weight.shape
    return PackedLinear(weight.to(torch.float32).contiguous(), (num_out, num_in), weight.dtype)


def linear(
    x: Tensor, packed: PackedLinear, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M, K] times the packed weight [N, K] transposed, plus `bias` [N]: [M, N] in `out_dtype` (default x.dtype).

    x may be a view with a row stride; its last dimension must be contiguous.
    """
    return linear_reference(x, packed.data, bias).to(out_dtype or x.dtype)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [M, N]. Rows are padded to a multiple of 4: measured, MKL then gives a row the same
    bits in a call of any size (unpadded it does not)."""
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -num_rows % 4))
    y = torch.nn.functional.linear(padded, weight)[:num_rows]
    return y if bias is None else y + bias.to(torch.float32)
