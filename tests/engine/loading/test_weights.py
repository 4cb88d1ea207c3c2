from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.formats import Checkpoint
from engine.loading.store import ModelError, ModelFolder
from engine.loading.weights import DummyWeights, WeightReader

Calls = list[tuple[str, int, int]]


@pytest.fixture
def reader(tmp_path: Path) -> tuple[WeightReader, Calls]:
    (tmp_path / "config.json").write_text("{}")
    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4), "q": torch.zeros(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    calls: Calls = []
    checkpoint = Checkpoint(ModelFolder(tmp_path))
    return WeightReader(checkpoint, torch.bfloat16, lambda *call: calls.append(call)), calls


def test_take_converts_and_counts(reader: tuple[WeightReader, Calls]) -> None:
    weights, calls = reader
    assert weights.take("a.weight", (2, 3)).dtype is torch.bfloat16
    weights.take("b.weight", (4,))
    assert calls == [("loading weights", 24, 42), ("loading weights", 40, 42)]


def test_missing_tensor(reader: tuple[WeightReader, Calls]) -> None:
    with pytest.raises(ModelError, match=r"\(model\.safetensors\) hold no c\.weight"):
        reader[0].take("c.weight", (1,))


def test_other_shape(reader: tuple[WeightReader, Calls]) -> None:
    with pytest.raises(ModelError, match=r"a\.weight has the shape \[2, 3\]; config\.json calls for \[3, 2\]"):
        reader[0].take("a.weight", (3, 2))


def test_other_kind(reader: tuple[WeightReader, Calls]) -> None:
    with pytest.raises(ModelError, match="q is I8; supported are F32, BF16, F16"):
        reader[0].take("q", (2,))


def test_left_over(reader: tuple[WeightReader, Calls], caplog: pytest.LogCaptureFixture) -> None:
    weights, _ = reader
    with pytest.raises(ModelError, match=r"holds a\.weight and 1 more, which config\.json does not call for"):
        weights.finish((".nothing", "q"))
    weights.take("a.weight", (2, 3))
    weights.take("b.weight", (4,))
    with caplog.at_level("INFO", "engine"):
        weights.finish(("q",))
    (record,) = map(vars, caplog.records)
    assert (record["msg"], record["bytes"]) == ("weights_loaded", 40)
    assert record["bytes_per_second"] > 0


def test_dummy_weights_are_the_same_every_time_and_never_zeros() -> None:
    first, second = (DummyWeights(torch.bfloat16, torch.device("cpu")) for _ in range(2))
    weight = first.take("layer.0.weight", (64, 32))
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, second.take("layer.0.weight", (64, 32)))
    assert not torch.equal(weight, first.take("layer.1.weight", (64, 32)))
    assert abs(float(weight.float().std()) - 0.02) < 0.002
    assert abs(float(first.take("model.norm.weight", (500,)).float().mean()) - 1) < 0.01
