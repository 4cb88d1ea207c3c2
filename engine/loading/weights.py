"""Hands out the tensors of a checkpoint to the modules that are built from them.

Every tensor is taken once and its shape checked; what nobody took is an error as well, so that a
model is never served with a part of it random or left out.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from engine.loading.formats import Checkpoint
from engine.loading.store import ModelError
from engine.plan import Progress

_CPU = torch.device("cpu")

#: The dtypes that weights may be stored in, by their names in safetensors.
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(Protocol):
    """What modules take their tensors from. `device` is where they are."""

    device: torch.device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`. Raises ModelError when it is absent or of another shape or kind."""
        ...


class DummyWeights:
    """Seeded random values in place of a checkpoint, for measurements: a tensor depends on its name alone.

    Norms are near 1, all else is normal with a standard deviation of 0.02. Never zeros, on which
    matrix units run faster than on real weights.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        mean = 1.0 if "norm" in name else 0.0
        return torch.empty(shape, dtype=self._dtype, device=self.device).normal_(mean, 0.02, generator=generator)


class WeightReader:
    """Tensors of `checkpoint` on `device`, converted to `dtype`; `progress` counts the bytes read."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress, device: torch.device = _CPU
    ) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._left = set(checkpoint.entries)
        self._progress = progress
        self._done = 0
        self._total = checkpoint.num_bytes

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`. Raises ModelError when it is absent or of another shape or kind."""
        entry = self._checkpoint.entries.get(name)
        if entry is None:
            files = ", ".join(file.name for file in self._checkpoint.files)
            raise ModelError(f"The weights ({files}) hold no {name}, which config.json calls for.")
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file.name}: {name} has the shape {list(entry.shape)}; config.json calls for {list(shape)}."
            )
        if entry.dtype not in STORED:
            raise ModelError(f"{entry.file.name}: {name} is {entry.dtype}; supported are {', '.join(STORED)}.")
        tensor = self._checkpoint.read(name).to(self.device, self._dtype)
        self._left.discard(name)
        self._done += entry.num_bytes
        self._progress("loading weights", self._done, self._total)
        return tensor

    def finish(self, ignored: tuple[str, ...]) -> None:
        """Raise ModelError when tensors are left over whose names do not end in one of `ignored`."""
        left = sorted(name for name in self._left if not name.endswith(ignored))
        if left:
            entry = self._checkpoint.entries[left[0]]
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"{entry.file.name} holds {left[0]}{more}, which config.json does not call for.")
