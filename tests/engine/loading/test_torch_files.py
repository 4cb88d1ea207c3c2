from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from engine.loading.formats import Checkpoint, TensorEntry
from engine.loading.store import ModelError, ModelFolder


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    (tmp_path / "config.json").write_text("{}")
    return ModelFolder(tmp_path)


def test_single_file(folder: ModelFolder) -> None:
    file = folder.path / "pytorch_model.bin"
    x, y = torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.arange(4.0)
    torch.save({"x": x, "turned": y.view(2, 2).t(), "q": torch.ones(2, dtype=torch.int32)}, file)
    checkpoint = Checkpoint(folder)
    assert checkpoint.entries == {
        "x": TensorEntry(file, "BF16", (2, 3), 12),
        "turned": TensorEntry(file, "F32", (2, 2), 16),
        "q": TensorEntry(file, "I32", (2,), 8),
    }
    assert torch.equal(checkpoint.read("x"), x)
    assert torch.equal(checkpoint.read("x", (range(1, 2), range(1))), x[1:2, :1])
    turned = checkpoint.read("turned")
    assert turned.is_contiguous()
    assert turned.tolist() == [[0, 2], [1, 3]]
    file.unlink()
    assert turned.tolist() == [[0, 2], [1, 3]], "it is in memory of its own"


def test_header_tells_tensors_apart(folder: ModelFolder) -> None:
    file = folder.path / "pytorch_model.bin"
    seen = set()
    for tensors in (
        {"x": torch.zeros(4)},
        {"y": torch.zeros(4)},
        {"x": torch.zeros(2, 2)},
        {"x": torch.zeros(4).int()},
    ):
        torch.save(tensors, file)
        seen.add(Checkpoint(folder).header(file))
    assert len(seen) == 4


def test_sharded(folder: ModelFolder) -> None:
    torch.save({"x": torch.zeros(2)}, folder.path / "pytorch_model-00001-of-00002.bin")
    torch.save({"y": torch.ones(3)}, folder.path / "pytorch_model-00002-of-00002.bin")
    index = {"weight_map": {name: f"pytorch_model-0000{n}-of-00002.bin" for n, name in ((1, "x"), (2, "y"))}}
    (folder.path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert Checkpoint(folder).read("y").tolist() == [1.0, 1.0, 1.0]


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of a weight file was run')",)


@pytest.mark.parametrize("content", ["cut", "text", "code", "pickle", "list"])
def test_what_holds_no_tensors_alone(folder: ModelFolder, content: str) -> None:
    file = folder.path / "pytorch_model.bin"
    torch.save({"x": _Code() if content == "code" else torch.zeros(999)}, file)
    match content:
        case "cut":
            file.write_bytes(file.read_bytes()[:2000])
        case "text":
            file.write_text("hello")
        case "pickle":
            file.write_bytes(pickle.dumps(_Code()))
        case "list":
            torch.save([torch.zeros(2)], file)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin (cannot be read as weights|must hold a table of named)"):
        Checkpoint(folder)
