"""Weight files as one table of named tensors, whatever their format; headers of safetensors are read here.

Knows nothing of torch, so that a folder can be looked at without loading anything.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.loading.stacked import apart
from engine.loading.store import ModelError, ModelFolder
from engine.loading.weight_files import weight_files

if TYPE_CHECKING:
    from torch import Tensor

#: The format's own bound of a header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies; `dtype` is safetensors' name ("F32", "BF16", "F16", …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file, from `start` on, that are a tensor of `dtype` (safetensors' name) as it lies in memory."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]


#: A part of a tensor: which indices of each dimension, without gaps.
Region = tuple[range, ...]


class WeightFile(Protocol):
    """One open file of weights."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The tensor or a part of it, in memory of its own, as the file has it."""
        ...

    def extent(self, name: str, region: Region | None = None) -> Extent | None:
        """Where the file holds what `read` answers; None unless it does so in one piece. Raises what `read` raises."""
        ...

    def header(self) -> bytes:
        """What names and describes the tensors, for the model's digest."""
        ...


class Checkpoint:
    """All tensors of a model folder. Raises ModelError for a missing, cut or inconsistent file."""

    def __init__(self, folder: ModelFolder, load_format: str = "auto") -> None:
        """`load_format` is one of `weight_files.LOAD_FORMATS`."""
        chosen = weight_files(folder, load_format)
        self.format = chosen.format
        self.files = chosen.files
        self.entries: dict[str, TensorEntry] = {}
        self._opened: dict[Path, WeightFile] = {}
        for file in self.files:
            opened = self._opened[file] = _open(file, chosen.format, folder)
            for name, entry in opened.entries.items():
                if name in self.entries:
                    raise ModelError(f"{file} holds {name}, which {self.entries[name].file.name} holds as well.")
                self.entries[name] = entry

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The tensor, or a part of it alone, copied out of its file, in the file's dtype."""
        return self._opened[self.entries[name].file].read(name, region)

    def extent(self, name: str, region: Region | None = None) -> Extent | None:
        """Where a file holds what `read` answers; None unless it does so in one piece."""
        return self._opened[self.entries[name].file].extent(name, region)

    def header(self, file: Path) -> bytes:
        """What names and describes the tensors of one of `files`."""
        return self._opened[file].header()


def _open(file: Path, weight_format: str, folder: ModelFolder) -> WeightFile:
    """Imported on use: they need torch, or a package that may be absent."""
    if weight_format == "safetensors":
        safe: WeightFile = importlib.import_module("engine.loading.safetensors_files").SafetensorsFile(file)
        return safe
    if weight_format == "pt":
        pt: WeightFile = importlib.import_module("engine.loading.torch_files").TorchFile(file)
        return pt
    gguf: WeightFile = importlib.import_module("engine.loading.gguf_files").GGUFFile(file, folder)
    return gguf


def slices(region: Region) -> tuple[slice, ...]:
    """The same as an index."""
    return tuple(slice(part.start, part.stop) for part in region)


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file. Raises ModelError when the file is cut or is none."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, _MAX_HEADER_BYTES))
    if len(header) != length or not header.startswith(b"{"):
        raise ModelError(f"{file} is not a safetensors file, or was not copied whole.")
    return header


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file. Raises ModelError when it is cut, too long or malformed."""
    return {name: entry for name, (entry, _) in tensors_with_starts(file).items()}


def tensors_with_starts(file: Path) -> dict[str, tuple[TensorEntry, int]]:
    """As `tensor_entries`, each with the byte of the file at which it begins."""
    header = read_header(file)
    try:
        table = json.loads(header)
        found = {name: _tensor(file, value, 8 + len(header)) for name, value in table.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file} has a malformed safetensors header: {error!r}.") from error
    expected = max((start + entry.num_bytes for entry, start in found.values()), default=8 + len(header))
    size = file.stat().st_size
    if size != expected:
        raise ModelError(f"{file} has {size} bytes, its header describes {expected}. Fetch the file again.")
    return apart(found)


def _tensor(file: Path, described: Mapping[str, Any], data: int) -> tuple[TensorEntry, int]:
    """`data` is where the offsets of a header count from. Raises what a malformed header raises."""
    begin, end = map(int, described["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin} and {end}")
    shape = tuple(int(size) for size in described["shape"])
    return TensorEntry(file, str(described["dtype"]), shape, num_bytes=end - begin), data + begin
