"""Weights as they are: float32, bfloat16 or float16, one `weight` tensor a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from engine.loading.weights import Weights
from engine.quant import LinearPart


@dataclass(frozen=True, slots=True)
class UnquantizedWeight:
    packed: kernels.PackedLinear

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return kernels.linear(x, self.packed, bias)

    def added_product(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        return kernels.add_linear(x, self.packed, bias, residual)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: kernels.Activation) -> Tensor:
        return kernels.gated_linear(x, self.packed, bias, activation)

    def wide_product(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.packed, out_dtype=torch.float32)


def plain(weights: Sequence[Tensor]) -> UnquantizedWeight:
    """One weight out of matrices [rows, columns] of equal columns and dtype."""
    return UnquantizedWeight(kernels.pack_linear(weights[0] if len(weights) == 1 else torch.cat(tuple(weights))))


class Unquantized:
    name = "unquantized"

    def load(self, reader: Weights, parts: Sequence[LinearPart]) -> UnquantizedWeight:
        return plain([reader.take(f"{part.name}.weight", (part.rows, part.columns)) for part in parts])

    def load_head(self, reader: Weights, head: LinearPart) -> UnquantizedWeight:
        return self.load(reader, (head,))
