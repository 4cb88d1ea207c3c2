"""Uploads to a CPU, which has the same threads, ring and pieces; and to a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.formats import Checkpoint, Extent
from engine.loading.safetensors_files import DTYPES, SafetensorsFile
from engine.loading.store import ModelError, ModelFolder
from engine.loading.upload import Upload
from engine.loading.weights import WeightReader

CPU = torch.device("cpu")


def extent(file: SafetensorsFile, name: str) -> Extent:
    found = file.extent(name)
    assert found is not None
    return found


def test_tensors_of_every_type_in_pieces(tmp_path: Path) -> None:
    """Pieces of 1000 bytes, three threads: a ring of six, used again and again."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: (torch.randn(70, 33, generator=generator) * 50).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "piece": torch.arange(125)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    upload = Upload(CPU, piece_bytes=1000, threads=3)
    for name, tensor in tensors.items():
        found = upload(extent(file, name))
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    upload.close()


def test_a_tensor_is_shared_among_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 bytes among four, 200 in pieces of the least size."""
    monkeypatch.setattr("engine.loading.upload._LEAST_BYTES", 100)
    tensors = {"large": torch.arange(2500), "small": torch.arange(25)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    upload = Upload(CPU, piece_bytes=10_000, threads=4)
    pieces: list[int] = []
    monkeypatch.setattr("engine.loading.upload.fill", lambda memory, *where: pieces.append(len(memory)))
    for name in tensors:
        upload(extent(file, name))
    upload.close()
    assert sorted(pieces) == [100, 100] + [5000] * 4


def test_parts_that_lie_in_one_piece(tmp_path: Path) -> None:
    x = torch.arange(77).view(7, 11)
    save_file({"x": x, "vector": x[0].clone()}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    upload = Upload(CPU, piece_bytes=64, threads=2)
    for rows, columns in ((range(2, 5), range(11)), (range(6, 7), range(4, 11))):
        found = file.extent("x", (rows, columns))
        assert found is not None
        assert torch.equal(upload(found), x[rows.start : rows.stop, columns.start : columns.stop])
    part = file.extent("vector", (range(4, 9),))
    assert part is not None
    assert torch.equal(upload(part), x[0, 4:9])
    assert file.extent("x", (range(7), range(3, 4))) is None
    upload.close()


def test_a_file_that_is_cut_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(1000), "b": torch.arange(3)}, path)
    file = SafetensorsFile(path)
    upload = Upload(CPU, piece_bytes=100, threads=3)
    os.truncate(path, 4000)
    with pytest.raises(ModelError, match=r"a\.safetensors was cut while it was read"):
        upload(extent(file, "a"))
    path.unlink()
    with pytest.raises(ModelError, match=r"a\.safetensors cannot be read: No such file"):
        upload(extent(file, "b"))
    upload.close()


@pytest.mark.gpu
def test_a_gpu_has_what_a_cpu_reads(tmp_path: Path) -> None:
    """Tensors follow each other through the ring while the one before is still being copied and added up."""
    (tmp_path / "config.json").write_text("{}")
    tensors = {str(number): torch.randn(3000, 500 + number).bfloat16() for number in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = WeightReader(
        Checkpoint(ModelFolder(tmp_path)), torch.bfloat16, lambda *call: None, torch.device("cuda", 0)
    )
    for name, tensor in tensors.items():
        found = reader.take(name, tuple(tensor.shape))
        assert torch.equal(torch.cat((found, found)).cpu(), torch.cat((tensor, tensor)))
    reader.finish(())
