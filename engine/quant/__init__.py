"""How the weight of a linear layer is stored and multiplied: one file a format.

A format is a LinearMethod. `layers.linear` knows nothing else of it, so a quantized format adds a
file here and touches no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.loading.weights import WeightReader


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


class LinearMethod(Protocol):
    """A storage format. `name` says format and kernel; it is a part of the numerics hash."""

    name: str

    def load(self, reader: WeightReader, parts: Sequence[LinearPart]) -> LinearWeight:
        """One weight whose output is that of the parts side by side. Raises ModelError."""
        ...
