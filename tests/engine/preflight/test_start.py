"""The look that an engine takes before it loads: all problems in one error, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.preflight.start import require_one_device, require_servable
from tests.engine.preflight.folders import CONFIG, write_model


def config(folder: Path, *flags: str) -> EngineConfig:
    return EngineConfig.load([str(folder), *flags], {}, prog="engine")


def test_a_good_model_passes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", CONFIG | {"max_position_embeddings": 2048})
    require_servable(folder, config(folder, "--device=cpu"))
    require_servable(folder, config(folder))  # memory is not judged where there may be a GPU


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as caught:
        require_servable(folder, config(folder, "--device=cpu", "--max-model-len=1000000"))
    text = str(caught.value)
    assert text.startswith(f"{folder} has ")
    for part in (
        "model-00002-of-00002.safetensors is missing",
        "has no tokenizer",
        "--max-model-len 1000000 is more than",
    ):
        assert part in text


def test_three_devices_are_refused_in_vllms_words_and_ours(tmp_path: Path) -> None:
    """Case M3 of the list of faults: before weights are read."""
    folder = write_model(tmp_path / "m")
    with pytest.raises(ModelError) as caught:
        require_servable(folder, config(folder, "--device=cpu", "--tensor-parallel-size=3", "--max-model-len=1024"))
    assert "Total number of attention heads (32) must be divisible by tensor parallel size (3)." in str(caught.value)
    one_device = "--tensor-parallel-size 3: an engine runs a model on one device so far. Leave it out, or set it to 1."
    assert one_device in str(caught.value)


def test_a_model_that_is_not_here_is_not_fetched_for_two_devices() -> None:
    require_one_device(EngineConfig.load(["org/model"], {}, prog="engine"))
    with pytest.raises(ModelError, match="--tensor-parallel-size 2: an engine runs a model on one device"):
        require_one_device(EngineConfig.load(["org/model", "--tensor-parallel-size=2"], {}, prog="engine"))
