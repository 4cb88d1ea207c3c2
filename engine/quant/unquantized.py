"""Weights as they are: float32, bfloat16 or float16, one `weight` tensor a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from engine.loading.weights import Weights
from engine.quant import ExpertParts, LinearPart


@dataclass(frozen=True, slots=True)
class UnquantizedWeight:
    packed: kernels.PackedLinear

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return kernels.linear(x, self.packed, bias)

    def added_product(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        return kernels.add_linear(x, self.packed, bias, residual)

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: kernels.Activation) -> Tensor:
        return kernels.gated_linear(x, self.packed, bias, activation)

    def normed_product(self, x: Tensor, norm: kernels.RowNorm, bias: Tensor | None) -> Tensor:
        return kernels.normed_linear(x, norm, self.packed, bias)

    def normed_gated_product(
        self, x: Tensor, norm: kernels.RowNorm, bias: Tensor | None, activation: kernels.Activation
    ) -> Tensor:
        return kernels.normed_gated_linear(x, norm, self.packed, bias, activation)

    def wide_product(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.packed, out_dtype=torch.float32)


def plain(weights: Sequence[Tensor]) -> UnquantizedWeight:
    """One weight out of matrices [rows, columns] of equal columns and dtype."""
    return UnquantizedWeight(kernels.pack_linear(*weights))


@dataclass(frozen=True, slots=True)
class UnquantizedExperts:
    packed: kernels.PackedExperts

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return kernels.mix_experts(x, chosen, weights, self.packed)


def plain_experts(
    weight: Callable[[Weights, LinearPart], Tensor], reader: Weights, experts: Sequence[ExpertParts]
) -> UnquantizedExperts:
    """The experts of a layer, each put into its place before the next is read. `weight` answers a matrix [rows,
    columns] in the dtype in force.
    """
    inner_size, hidden_size = experts[0].gate.shape
    packed = kernels.empty_experts(len(experts), hidden_size, inner_size, dtype=reader.dtype, device=reader.device)
    for number, expert in enumerate(experts):
        packed.fill(number, *(weight(reader, part) for part in (expert.gate, expert.up, expert.down)))
    return UnquantizedExperts(packed)


class PlainAtLoad(ABC):
    """A `LinearMethod` whose weights are plain once they are loaded: a format says what `weight` of a part is."""

    __slots__ = ()

    @abstractmethod
    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""

    def load(self, reader: Weights, parts: Sequence[LinearPart]) -> UnquantizedWeight:
        return plain([self.weight(reader, part) for part in parts])

    def load_logits(self, reader: Weights, part: LinearPart) -> UnquantizedWeight:
        return self.load(reader, (part,))

    def load_experts(self, reader: Weights, experts: Sequence[ExpertParts]) -> UnquantizedExperts:
        return plain_experts(self.weight, reader, experts)


class Unquantized(PlainAtLoad):
    name = "unquantized"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""
        return reader.take(f"{part.name}.weight", (part.rows, part.columns), part.region)
