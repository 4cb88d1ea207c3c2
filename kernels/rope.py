"""Rotary position embedding (Su et al., 2021), halves rotated against each other as in transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES


def rope_(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [M, num_heads, head_dim] and k [M, num_kv_heads, head_dim] in place.

    `positions` [M] (int32 or int64) are rows of `cos_sin`, float32 [num_positions, rotary_dim]:
    cosines in the first half, sines in the second. Dimensions from rotary_dim on stay as they are.
    q and k may be views with a row stride (slices of one fused projection). Computed in float32,
    rounded once to their dtype. Raises IndexError for a position outside the table.
    """
    library = native()
    if library is None:
        return rope_reference_(q, k, positions, cos_sin)
    num_positions, rotary_dim = cos_sin.shape
    rows = positions.to(torch.int32).contiguous()
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    for x in (q, k):
        num_rows, num_heads, head_dim = x.shape
        assert num_rows == rows.shape[0]
        assert rotary_dim <= head_dim
        assert x.stride()[1:] == (head_dim, 1)
        if not library.rope(
            *(x.data_ptr(), x.stride(0), num_heads, head_dim, rows.data_ptr(), num_rows),
            *(cos_sin.data_ptr(), num_positions, rotary_dim, DTYPES[x.dtype]),
        ):
            raise IndexError(f"rope positions must be in 0..{num_positions - 1}, got {rows.min()}..{rows.max()}.")


def rope_reference_(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    rows = cos_sin.index_select(0, positions.long())  # [M, rotary_dim]
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)  # [M, 1, rotary_dim / 2] each
    half = cos.shape[-1]
    for x in (q, k):
        low, high = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        x[..., : 2 * half] = turned.to(x.dtype)
