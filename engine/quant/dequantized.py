"""Quantized weights made plain as they are loaded: the reference of every format.

A weight is computed in float32 out of its integers and scales, rounded once to the dtype in force, and
from there on it is a plain weight: its products have the bits that a checkpoint of the dequantized
weights would give. It takes their memory, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.loading.weights import Weights
from engine.quant import LinearPart
from engine.quant.unquantized import PlainAtLoad


class Layout(Protocol):
    """How a format stores one matrix."""

    @property
    def name(self) -> str:
        """The format with all that its arithmetic depends on."""
        ...

    @property
    def mark(self) -> str:
        """Ending of the tensor that a quantized module has and a plain one has not."""
        ...

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]. Raises ModelError."""
        ...


@dataclass(frozen=True, slots=True)
class Dequantized(PlainAtLoad):
    """The LinearMethod of a layout. A module without the layout's mark is plain, whatever lists of modules the
    config has: the tensors are what was written.
    """

    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.layout.name}, dequantized"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""
        if not reader.has(part.name + self.layout.mark):
            return reader.take(f"{part.name}.weight", (part.rows, part.columns), part.region)
        return self.layout.weight(reader, part).to(reader.dtype)


def in_blocks(scales: Tensor, region: tuple[range, range], block: tuple[int, int]) -> Tensor:
    """Scales of the blocks [r, c] that hold `region` (`blocks_of`), one for each element of it (or one to be
    broadcast). float32.
    """
    wide = scales.float()
    for dim, (part, size) in enumerate(zip(region, block, strict=True)):
        if wide.shape[dim] > 1 and size > 1:
            index = torch.arange(part.start, part.stop, device=wide.device) // size - part.start // size
            wide = wide.index_select(dim, index)
    return wide


def blocks_of(region: tuple[range, range], block: tuple[int, int]) -> tuple[range, range]:
    """The blocks that hold the elements of a region."""
    rows, columns = (
        range(part.start // size, (part.stop - 1) // size + 1) for part, size in zip(region, block, strict=True)
    )
    return rows, columns


def num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks cover `shape`, the last ones perhaps cut."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """values * scales in float32, [rows, columns] and contiguous."""
    return torch.mul(values.float(), scales).contiguous()
