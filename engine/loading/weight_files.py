"""Which files of a model folder hold its weights. Knows their names, not what is in them.

The order is that of vLLM's `--load-format auto`: safetensors before torch's own files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.loading.store import ModelError, ModelFolder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf")

#: Written by trainers beside weights.
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of a format are called: one file, or an index that names several, or any of a suffix."""

    single: str
    index: str
    suffixes: tuple[str, ...]


_FORMATS = {
    "safetensors": _Names(SINGLE, INDEX, (".safetensors",)),
    "pt": _Names("pytorch_model.bin", "pytorch_model.bin.index.json", (".bin", ".pt")),
    "gguf": _Names("model.gguf", "model.gguf.index.json", (".gguf",)),
}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """`format` is safetensors, pt or gguf."""

    format: str
    files: tuple[Path, ...]


def weight_files(folder: ModelFolder, load_format: str) -> WeightFiles:
    """The weight files of `folder`, of the one format asked for or the first found ("auto").

    Raises ModelError when there are none, or a shard is missing.
    """
    wanted = tuple(_FORMATS) if load_format == "auto" else (load_format,)
    for name in wanted:
        if files := _of_format(folder, _FORMATS[name]):
            return WeightFiles(name, files)
    names = [name for wants in wanted for name in (_FORMATS[wants].single, _FORMATS[wants].index)]
    there = sorted(name for name, names in _FORMATS.items() if name not in wanted and _of_format(folder, names))
    remedy = f"--load-format {there[0]} reads what is there." if there else "Fetch the model again."
    raise ModelError(
        f"{folder.path} has no weights: neither {' nor '.join(names)}, nor another "
        f"*{' or *'.join(suffix for wants in wanted for suffix in _FORMATS[wants].suffixes)}. {remedy}"
    )


def _of_format(folder: ModelFolder, names: _Names) -> tuple[Path, ...]:
    """Files of a format, none when there are none."""
    if folder.has(names.single):
        return (folder.path / names.single,)
    if folder.has(names.index):
        return _indexed(folder, names.index)
    for suffix in names.suffixes:
        # Mistral's own copy of the weights stands beside the one in the usual names.
        files = sorted(
            file
            for file in folder.path.glob(f"*{suffix}")
            if file.is_file() and file.name not in _NO_WEIGHTS and not file.name.startswith("consolidated")
        )
        if files:
            _check_shards(files)
            return tuple(files)
    return ()


def _indexed(folder: ModelFolder, index: str) -> tuple[Path, ...]:
    weight_map = folder.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder.path / index} has no weight_map.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder.path / index} names {name!r}, which is not a file beside it.")
        if not folder.has(name):
            raise ModelError(f"{folder.path / name} is missing: {index} lists it. Fetch the model again.")
    return tuple(folder.path / name for name in names)


def _check_shards(files: list[Path]) -> None:
    """Raise ModelError when files without an index say that there are more of them."""
    there = {file.name for file in files}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            stem, _, count, suffix = match.groups()
            for number in range(1, int(count) + 1):
                name = f"{stem}-{number:05}-of-{count}{suffix}"
                if name not in there:
                    raise ModelError(
                        f"{file.parent / name} is missing: {file.name} says that there are {int(count)} such files. "
                        f"Fetch the model again."
                    )
