"""Quantizers and packers of every layout, written one element at a time: the reference of the readers.

Each answers the tensors of one module [rows, columns] and the weight they stand for, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

#: AWQ's nibble i of a word holds this column of eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packed:
    """Tensors by their endings, and the float32 weight [rows, columns] that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


def stream(values: Ints, bits: int) -> Tensor:
    """A row of integers as one stream of bits, lowest first, cut into int32 words; each row for itself."""
    rows = []
    for row in values:
        whole = sum(int(value) << (bits * place) for place, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([whole >> (32 * word) & 0xFFFFFFFF for word in range(count)])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def _random(shape: tuple[int, ...], bits: int, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 2**bits, shape)


def _scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.02 + 0.005).to(dtype)


def gptq(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    version: int = 1,
    seed: int = 0,
) -> Packed:
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    values = _random((columns, rows), bits, seed)
    zeros = np.full((groups, rows), 2 ** (bits - 1)) if symmetric else _random((groups, rows), bits, seed + 1)
    scales = _scales((groups, rows), torch.float16, seed)
    group = np.arange(columns) // size
    if act_order:
        group = np.random.default_rng(seed).permutation(group)
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    weight = torch.empty(rows, columns)
    for k in range(columns):
        steps = torch.from_numpy(values[k] - zeros[group[k]]).float()
        weight[:, k] = steps * scales[group[k]].float()
    tensors = {
        "qweight": stream(values.T, bits).t().contiguous(),
        "qzeros": stream(stored, bits),
        "scales": scales,
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    return Packed(tensors, weight)


def awq(rows: int, columns: int, *, group_size: int = 32, dtype: torch.dtype = torch.float16, seed: int = 0) -> Packed:
    groups = columns // group_size
    values, zeros = _random((columns, rows), 4, seed), _random((groups, rows), 4, seed + 1)
    scales = _scales((groups, rows), dtype, seed)

    def packed(matrix: Ints) -> Tensor:
        order = [8 * word + place for word in range(rows // 8) for place in AWQ_ORDER]
        return stream(matrix[:, order], 4)

    weight = torch.empty(rows, columns)
    for k in range(columns):
        weight[:, k] = torch.from_numpy(values[k] - zeros[k // group_size]).float() * scales[k // group_size].float()
    return Packed({"qweight": packed(values), "qzeros": packed(zeros), "scales": scales}, weight)


def packed_int(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    act_order: bool = False,
    seed: int = 0,
) -> Packed:
    """compressed-tensors' pack-quantized; `group_size` None is a scale for each row."""
    size = columns if group_size is None else group_size
    groups = -(-columns // size)
    values = _random((rows, columns), bits, seed)
    zeros = np.full((rows, groups), 2 ** (bits - 1)) if symmetric else _random((rows, groups), bits, seed + 1)
    scales = _scales((rows, groups), torch.bfloat16, seed)
    group = np.arange(columns) // size
    if act_order:
        group = np.random.default_rng(seed).permutation(group)
    weight = torch.empty(rows, columns)
    for k in range(columns):
        steps = torch.from_numpy(values[:, k] - zeros[:, group[k]]).float()
        weight[:, k] = steps * scales[:, group[k]].float()
    tensors = {
        "weight_packed": stream(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(zeros.T, bits).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
    return Packed(tensors, weight)


def scaled_bytes(
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype,
    block: tuple[int, int],
    scale_dtype: torch.dtype = torch.bfloat16,
    scale_name: str = "weight_scale",
    seed: int = 0,
) -> Packed:
    """int8 or FP8, one element to a byte, with a scale for each block [rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, columns, generator=generator) * 40).clamp(-127, 127).to(dtype)
    scales = _scales((-(-rows // block[0]), -(-columns // block[1])), scale_dtype, seed)
    weight = torch.empty(rows, columns)
    for k in range(columns):
        weight[:, k] = values[:, k].float() * scales[torch.arange(rows) // block[0], k // block[1]].float()
    return Packed({"weight": values, scale_name: scales}, weight)
