"""Are a model's weight files all there and whole? Headers and sizes are read, no weights."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from engine.loading.formats import TensorEntry, tensor_entries
from engine.loading.store import ModelError, ModelFolder
from engine.loading.weight_files import WeightFiles, weight_files
from engine.preflight.report import Report

_ABOUT = "files"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FETCH = "Fetch the files again, or the whole model with `sluicegate models pull`."


def check_files(folder: ModelFolder, load_format: str, report: Report) -> dict[str, TensorEntry] | None:
    """The tensors of all files, by name; None where they cannot be told without reading the weights."""
    try:
        chosen = weight_files(folder, load_format)
    except ModelError as error:
        return _incomplete(folder, error, report)
    size = sum(file.stat().st_size for file in chosen.files)
    report.fact(_ABOUT, f"{len(chosen.files)} of {chosen.format}, {size / 1e9:.2f} GB")
    if chosen.format == "safetensors":
        return _safetensors(chosen.files, report)
    _check_archives(chosen, report)
    return None


def _incomplete(folder: ModelFolder, error: ModelError, report: Report) -> dict[str, TensorEntry] | None:
    """`error` names the first file that is missing; here are all that an index lists, and what the others hold."""
    for index in _INDEXES:
        names = _listed(folder, index)
        missing = [name for name in names if not folder.has(name)]
        if missing:
            report.alike(_ABOUT, [f"{name} is missing; {index} lists it." for name in missing], _FETCH)
            there = [folder.path / name for name in names if folder.has(name) and name.endswith(".safetensors")]
            return _safetensors(there, report) if there else None
    report.problem(_ABOUT, str(error))
    return None


def _listed(folder: ModelFolder, index: str) -> list[str]:
    """Files beside an index that it names; none where it cannot be read."""
    try:
        weight_map = folder.read_object(index).get("weight_map") if folder.has(index) else None
    except ModelError:
        return []
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    return names if all(Path(name).name == name for name in names) else []


def _safetensors(files: Sequence[Path], report: Report) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    problems = []
    for file in files:
        try:
            found = tensor_entries(file)
        except (ModelError, OSError) as error:
            problems.append(str(error))
            continue
        twice = entries.keys() & found.keys()
        problems += [f"{file.name} holds {name}, which {entries[name].file.name} holds too." for name in sorted(twice)]
        entries |= found
    report.alike(_ABOUT, problems, _FETCH)
    return entries


def _check_archives(chosen: WeightFiles, report: Report) -> None:
    """torch's files are zip archives, whose table of contents is at the end."""
    cut = [f"{file.name} ({file.stat().st_size} bytes) is cut." for file in chosen.files if _is_cut_archive(file)]
    report.alike(_ABOUT, cut, _FETCH)
    report.warn(_ABOUT, f"Shapes are not compared: tensors of {chosen.format} cannot be listed without loading torch.")


def _is_cut_archive(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04" and not zipfile.is_zipfile(file)
