"""Hands out the tensors of a checkpoint to the modules that are built from them.

Every tensor is taken once and its shape checked; what nobody took is an error as well, so that a
model is never served with a part of it random or left out.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from engine.loading.formats import Checkpoint, Region, slices
from engine.loading.store import ModelError
from engine.loading.upload import Upload
from engine.plan import Progress

log = logging.getLogger("engine")

_CPU = torch.device("cpu")

#: The dtypes that weights may be stored in, by their names in safetensors.
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights(Protocol):
    """What modules take their tensors from. `device` is where they are, `dtype` what weights are converted to."""

    device: torch.device
    dtype: torch.dtype

    def has(self, name: str) -> bool:
        """Whether a checkpoint holds the tensor `name`."""
        ...

    def take(self, name: str, shape: tuple[int, ...], region: Region | None = None) -> Tensor:
        """The tensor `name`, which has this `shape` in the checkpoint, or what `region` says of it. Raises ModelError
        when it is absent or of another shape or kind.
        """
        ...

    def take_stored(
        self, name: str, shape: tuple[int, ...], stored: Collection[str], region: Region | None = None
    ) -> Tensor:
        """As `take`, of one of the dtypes `stored` (safetensors' names), and left in it."""
        ...


class DummyWeights:
    """Seeded random values in place of a checkpoint, for measurements: a tensor depends on its name alone.

    Norms are near 1, all else is normal with a standard deviation of 0.02. Never zeros, on which
    matrix units run faster than on real weights.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.dtype = dtype

    def has(self, name: str) -> bool:
        """No: there is no checkpoint, and every module gets a plain weight."""
        del name
        return False

    def take_stored(
        self, name: str, shape: tuple[int, ...], stored: Collection[str], region: Region | None = None
    ) -> Tensor:
        raise AssertionError(f"{name} {shape} {stored} {region}: only what `has` tells of is taken as it is stored")

    def take(self, name: str, shape: tuple[int, ...], region: Region | None = None) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        mean = 1.0 if "norm" in name else 0.0
        whole = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(mean, 0.02, generator=generator)
        return whole if region is None else whole[slices(region)].contiguous()


class WeightReader:
    """Tensors of `checkpoint` on `device`, converted to `dtype`; `progress` counts the bytes read."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress, device: torch.device = _CPU
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._left = set(checkpoint.entries)
        self._progress = progress
        self._done = 0
        self._total = checkpoint.num_bytes
        self._began = time.monotonic()
        self._upload = Upload(device) if device.type == "cuda" else None

    def has(self, name: str) -> bool:
        return name in self._checkpoint.entries

    def take(self, name: str, shape: tuple[int, ...], region: Region | None = None) -> Tensor:
        return self.take_stored(name, shape, STORED, region).to(self.dtype)

    def take_stored(
        self, name: str, shape: tuple[int, ...], stored: Collection[str], region: Region | None = None
    ) -> Tensor:
        """A single number may be stored with any number of dimensions. No more than `region` is read."""
        entry = self._checkpoint.entries.get(name)
        if entry is None:
            files = ", ".join(file.name for file in self._checkpoint.files)
            raise ModelError(f"The weights ({files}) hold no {name}, which config.json calls for.")
        if entry.shape != shape and not math.prod(entry.shape) == math.prod(shape) == 1:
            raise ModelError(
                f"{entry.file.name}: {name} has the shape {list(entry.shape)}; config.json calls for {list(shape)}."
            )
        if entry.dtype not in stored:
            raise ModelError(f"{entry.file.name}: {name} is {entry.dtype}; supported are {', '.join(stored)}.")
        if region is not None and all(len(part) == size for part, size in zip(region, shape, strict=True)):
            region = None
        tensor = self._read(name, region)
        self._left.discard(name)
        self._done += entry.num_bytes if region is None else tensor.nbytes
        self._progress("loading weights", self._done, self._total)
        return tensor.view(shape) if region is None else tensor

    def _read(self, name: str, region: Region | None) -> Tensor:
        extent = None if self._upload is None else self._checkpoint.extent(name, region)
        if self._upload is None or extent is None:
            return self._checkpoint.read(name, region).to(self.device)
        return self._upload(extent)

    def finish(self, ignored: tuple[str, ...]) -> None:
        """Raise ModelError when tensors are left over whose names do not end in one of `ignored`.

        A bias of zeros may be left: older GPTQ tools write one for every layer.
        """
        left = sorted(name for name in self._left if not name.endswith(ignored) and not self._is_zero_bias(name))
        if left:
            entry = self._checkpoint.entries[left[0]]
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(f"{entry.file.name} holds {left[0]}{more}, which config.json does not call for.")
        if self._upload is not None:
            self._upload.close()
        seconds = max(time.monotonic() - self._began, 1e-6)
        rate = round(self._done / seconds)
        log.info("weights_loaded", extra={"bytes": self._done, "seconds": round(seconds, 3), "bytes_per_second": rate})

    def _is_zero_bias(self, name: str) -> bool:
        return name.endswith(".bias") and not self._checkpoint.read(name).any()
