"""How the weight of a linear layer is stored and multiplied: one file a format.

A format is a LinearMethod. `layers.linear` knows nothing else of it, so a quantized format adds a
file here and touches no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import kernels
from engine.loading.quantization import Quantization
from engine.loading.store import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.loading.weights import Weights


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A matrix of the checkpoint, [rows, columns] under `name` (without the tensor's suffix), or a part of it: what
    one of several devices holds. Only the part is read, in any format.
    """

    name: str
    rows: int
    columns: int
    only_rows: range | None = None
    only_columns: range | None = None

    @property
    def region(self) -> tuple[range, range]:
        """The rows and the columns there are of it."""
        return self.only_rows or range(self.rows), self.only_columns or range(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the part."""
        rows, columns = self.region
        return len(rows), len(columns)

    def of_rank(self, rank: int, num_ranks: int, *, by_rows: bool) -> LinearPart:
        """An equal share of the part's rows, or columns. Raises ModelError where it cannot be divided."""
        rows, columns = self.region
        whole = rows if by_rows else columns
        size, rest = divmod(len(whole), num_ranks)
        if rest:
            raise ModelError(
                f"{self.name} has {len(whole)} {'rows' if by_rows else 'columns'}, which cannot be divided among "
                f"{num_ranks} devices."
            )
        own = whole[rank * size : (rank + 1) * size]
        return replace(self, only_rows=own) if by_rows else replace(self, only_columns=own)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The matrices of one expert, a gated MLP."""

    gate: LinearPart
    up: LinearPart
    down: LinearPart


class LinearWeight(Protocol):
    """A weight ready for use."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, columns] → [M, rows of all parts] in x.dtype."""
        ...

    def added_product(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """The product and the residual that it is still to be added to, or None and their sum."""
        ...

    def gated_product(self, x: Tensor, bias: Tensor | None, activation: kernels.Activation) -> Tensor:
        """The activation of the first half of the product times the second: [M, half the rows] in x.dtype."""
        ...

    def normed_product(self, x: Tensor, norm: kernels.RowNorm, bias: Tensor | None) -> Tensor:
        """The product of the normed x."""
        ...

    def normed_gated_product(
        self, x: Tensor, norm: kernels.RowNorm, bias: Tensor | None, activation: kernels.Activation
    ) -> Tensor:
        """The gated product of the normed x."""
        ...

    def wide_product(self, x: Tensor) -> Tensor:
        """x [M, columns] → float32 [M, rows]: logits."""
        ...


class ExpertsWeight(Protocol):
    """The experts of a layer, ready for use."""

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`kernels.mix_experts`: what the experts `chosen` [M, top_k] make of x, times `weights`, added up."""
        ...


class LinearMethod(Protocol):
    """A storage format. `name` says format and kernel; it is a part of the numerics hash."""

    @property
    def name(self) -> str: ...

    def load(self, reader: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """One weight whose output is that of the parts side by side. Raises ModelError."""
        ...

    def load_logits(self, reader: Weights, part: LinearPart) -> LinearWeight:
        """As `load`, for what makes logits, of tokens or experts: a format may leave it as it is. Raises ModelError."""
        ...

    def load_experts(self, reader: Weights, experts: Sequence[ExpertParts]) -> ExpertsWeight:
        """The experts of a layer, all of one size, one after another into their place. Raises ModelError."""
        ...


#: The method of a quantization (`engine.loading.quantization.NAMES`) to what makes a LinearMethod of its description.
METHODS = {
    "awq": "engine.quant.awq:method",
    "compressed-tensors": "engine.quant.compressed_tensors:method",
    "fp8": "engine.quant.fp8:method",
    "gptq": "engine.quant.gptq:method",
}

#: Endings of tensors beside quantized weights that no linear layer takes: scales of activations, and of the KV cache.
UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")


def method_of(quantization: Quantization | None) -> LinearMethod:
    """The storage format of a checkpoint. Raises ModelError for a variant that is not supported."""
    if quantization is None or not quantization.of_weights:
        plain: LinearMethod = importlib.import_module("engine.quant.unquantized").Unquantized()
        return plain
    module, attribute = METHODS[quantization.method].split(":")
    make: Callable[[Quantization], LinearMethod] = getattr(importlib.import_module(module), attribute)
    return make(quantization)
