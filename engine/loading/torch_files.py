"""pytorch_model.bin: torch's own files, of which only tensors are read and no code is run."""

from __future__ import annotations

from pathlib import Path

import orjson
import torch
from torch import Tensor

from engine.loading.formats import Extent, Region, TensorEntry, slices
from engine.loading.safetensors_files import DTYPES
from engine.loading.store import ModelError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchFile:
    """One file, mapped and not read: a tensor is copied when it is asked for. Raises ModelError."""

    def __init__(self, file: Path) -> None:
        self._tensors = _load(file)
        self.entries = {
            name: TensorEntry(
                file=file,
                dtype=_NAMES.get(tensor.dtype, str(tensor.dtype)),
                shape=tuple(tensor.shape),
                num_bytes=tensor.numel() * tensor.element_size(),
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, region: Region | None = None) -> Tensor:
        part = self._tensors[name] if region is None else self._tensors[name][slices(region)]
        return part.clone(memory_format=torch.contiguous_format)

    def extent(self, name: str, region: Region | None = None) -> Extent | None:
        del name, region  # the library alone knows
        return None

    def header(self) -> bytes:
        return orjson.dumps({name: [entry.dtype, entry.shape] for name, entry in sorted(self.entries.items())})


def _load(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a file that is not torch's raises nearly anything
        reason = str(error).split("\n", 1)[0]
        raise ModelError(
            f"{file} cannot be read as weights ({reason}). It was not copied whole, holds more than tensors, or was "
            f"written by a torch before 1.6; fetch it again, or save the model anew as safetensors."
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelError(f"{file} must hold a table of named tensors; save the model's state_dict alone.")
    return {name: tensor.detach() for name, tensor in loaded.items()}
