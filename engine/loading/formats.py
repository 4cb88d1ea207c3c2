"""Weight files as one table of named tensors: safetensors, in one file or several with an index.

Headers are read by ourselves and checked against the file size before a tensor is touched; the
data goes through safetensors' own reader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from engine.loading.store import ModelError, ModelFolder

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: The format's own bound of a header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies; `dtype` is the format's name ("F32", "BF16", "F16", …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Checkpoint:
    """All tensors of a model folder. Raises ModelError for a missing, cut or inconsistent file."""

    def __init__(self, folder: ModelFolder) -> None:
        self.files = _weight_files(folder)
        self.entries: dict[str, TensorEntry] = {}
        for file in self.files:
            for name, entry in tensor_entries(file).items():
                if name in self.entries:
                    raise ModelError(f"{file} holds {name}, which {self.entries[name].file.name} holds as well.")
                self.entries[name] = entry

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """The tensor, copied out of its file, in the file's dtype."""
        with safe_open(self.entries[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file. Raises ModelError when the file is cut or is none."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, _MAX_HEADER_BYTES))
    if len(header) != length or not header.startswith(b"{"):
        raise ModelError(f"{file} is not a safetensors file, or was not copied whole.")
    return header


def _weight_files(folder: ModelFolder) -> tuple[Path, ...]:
    if folder.has(SINGLE):
        return (folder.path / SINGLE,)
    if not folder.has(INDEX):
        raise ModelError(f"{folder.path} has neither {SINGLE} nor {INDEX}; weights must be safetensors.")
    weight_map = folder.read_object(INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder.path / INDEX} has no weight_map.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder.path / INDEX} names {name!r}, which is not a file beside it.")
        if not folder.has(name):
            raise ModelError(f"{folder.path / name} is missing: {INDEX} lists it. Fetch the model again.")
    return tuple(folder.path / name for name in names)


def tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file. Raises ModelError when it is cut, too long or malformed."""
    header = read_header(file)
    try:
        table = json.loads(header)
        entries = {
            name: TensorEntry(
                file=file,
                dtype=str(value["dtype"]),
                shape=tuple(int(size) for size in value["shape"]),
                num_bytes=int(value["data_offsets"][1]) - int(value["data_offsets"][0]),
            )
            for name, value in table.items()
            if name != "__metadata__"
        }
        end = max((int(v["data_offsets"][1]) for n, v in table.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file} has a malformed safetensors header: {error!r}.") from error
    expected, found = 8 + len(header) + end, file.stat().st_size
    if found != expected:
        raise ModelError(f"{file} has {found} bytes, its header describes {expected}. Fetch the file again.")
    return entries
