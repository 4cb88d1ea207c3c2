"""How the weight of a linear layer is stored and multiplied: one file a format.

A format is a LinearMethod. `layers.linear` knows nothing else of it, so a quantized format adds a
file here and touches no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import kernels
from engine.loading.store import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.loading.weights import Weights


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One matrix of the checkpoint: [rows, columns] under `name` (without the tensor's suffix)."""

    name: str
    rows: int
    columns: int


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


class LinearMethod(Protocol):
    """A storage format. `name` says format and kernel; it is a part of the numerics hash."""

    name: str

    def load(self, reader: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """One weight whose output is that of the parts side by side. Raises ModelError."""
        ...


#: `quantization_config.quant_method` in config.json to the class; None is a checkpoint without one.
METHODS: dict[str | None, str] = {
    None: "engine.quant.unquantized:Unquantized",
}


def method_of(config: Mapping[str, object]) -> LinearMethod:
    """The storage format of a checkpoint by its config.json. Raises ModelError naming what is supported."""
    described = config.get("quantization_config")
    name = None
    if described is not None:
        name = str(described.get("quant_method", "unnamed")) if isinstance(described, Mapping) else "unnamed"
    if name not in METHODS:
        supported = ", ".join(sorted(known for known in METHODS if known is not None))
        raise ModelError(
            f"config.json: quantization_config is of the method {name!r}; supported here: "
            f"{supported or 'unquantized checkpoints only'}."
        )
    module, attribute = METHODS[name].split(":")
    method: LinearMethod = getattr(importlib.import_module(module), attribute)()
    return method
