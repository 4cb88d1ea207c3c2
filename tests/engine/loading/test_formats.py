from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.formats import Checkpoint, TensorEntry
from engine.loading.store import ModelError, ModelFolder


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    (tmp_path / "config.json").write_text("{}")
    return ModelFolder(tmp_path)


def save(folder: ModelFolder, name: str, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder.path / name, metadata={"format": "pt"})
    return folder.path / name


def test_single_file(folder: ModelFolder) -> None:
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    file = save(folder, "model.safetensors", x=x, y=torch.ones(4))
    checkpoint = Checkpoint(folder)
    assert checkpoint.entries == {
        "x": TensorEntry(file, "BF16", (2, 3), 12),
        "y": TensorEntry(file, "F32", (4,), 16),
    }
    assert checkpoint.num_bytes == 28
    assert torch.equal(checkpoint.read("x"), x)


def test_sharded(folder: ModelFolder) -> None:
    save(folder, "a.safetensors", x=torch.zeros(2))
    save(folder, "b.safetensors", y=torch.ones(3))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(folder)
    assert [file.name for file in checkpoint.files] == ["a.safetensors", "b.safetensors"]
    assert checkpoint.read("y").tolist() == [1.0, 1.0, 1.0]


def test_missing_shard_is_named(tiny_models: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_models / "llama_sharded", tmp_path / "m")
    (tmp_path / "m" / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00006\.safetensors is missing"):
        Checkpoint(ModelFolder(tmp_path / "m"))


@pytest.mark.parametrize("weight_map", [None, {}, {"x": "../secret"}, {"x": "sub/a.safetensors"}])
def test_index_that_cannot_be_right(folder: ModelFolder, weight_map: object) -> None:
    (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json (has no weight_map|names)"):
        Checkpoint(folder)


def test_no_weights(folder: ModelFolder) -> None:
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 3, 20, -1])
def test_cut_file(folder: ModelFolder, keep: int) -> None:
    file = save(folder, "model.safetensors", x=torch.zeros(100))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("header", [b'{"x": 1}', b'{"x": {"dtype": "F32"}}', b"{]", b"not json", b"\x80\x04pickle"])
def test_malformed_header(folder: ModelFolder, header: bytes) -> None:
    (folder.path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(folder)


def test_a_tensor_in_two_files(folder: ModelFolder) -> None:
    save(folder, "a.safetensors", x=torch.zeros(2))
    save(folder, "b.safetensors", x=torch.ones(2))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder.path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"holds x, which a\.safetensors holds as well"):
        Checkpoint(folder)
