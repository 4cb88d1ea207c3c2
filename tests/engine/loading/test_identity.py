from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.formats import Checkpoint
from engine.loading.identity import model_digest, numerics_hash
from engine.loading.store import ModelFolder
from engine.loading.tokenizers import tokenizer_bundle


def digest(path: Path) -> str:
    folder = ModelFolder(path)
    return model_digest(folder, tokenizer_bundle(folder), Checkpoint(folder))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    save_file({"x": torch.arange(200_000, dtype=torch.float32)}, path / "model.safetensors")
    return path


def test_equal_for_a_copy_elsewhere(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert digest(model) == digest(tmp_path / "copy")
    assert len(digest(model)) == 64


def test_changes_with_every_part(model: Path) -> None:
    seen = {digest(model)}
    (model / "config.json").write_text('{"a": 1}')
    seen.add(digest(model))
    (model / "generation_config.json").write_text("{}")
    seen.add(digest(model))
    (model / "quantize_config.json").write_text("{}")
    seen.add(digest(model))
    (model / "tokenizer.json").write_text('{"b": 1}')
    seen.add(digest(model))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    seen.add(digest(model))
    save_file({"y": torch.arange(200_000, dtype=torch.float32)}, weights)
    seen.add(digest(model))
    weights.rename(model / "other.safetensors")
    index = {"weight_map": {"y": "other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    seen.add(digest(model))
    assert len(seen) == 8


def test_numerics_change_with_every_fact() -> None:
    facts: dict[str, str | int | bool] = {"digest": "a", "dtype": "bfloat16", "tensor_parallel_size": 1}
    base = numerics_hash(facts)
    assert numerics_hash(dict(reversed(facts.items()))) == base
    assert len({base, *(numerics_hash({**facts, name: "other"}) for name in facts)}) == 4
