from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.config import default_cache_dir
from tests.engine.tiny_models import make_tiny_models


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model folder for each of `tiny_models.VARIANTS`, `llama_sharded`, and golden.json."""
    folder = tmp_path_factory.mktemp("tiny_models")
    make_tiny_models(folder)
    return folder


@pytest.fixture(scope="session")
def golden(tiny_models: Path) -> dict[str, dict[str, list[list[float]]]]:
    """What transformers computed: {variant: {"ids": …, "logprobs": …}}, by prompt number."""
    golden: dict[str, dict[str, list[list[float]]]] = json.loads((tiny_models / "golden.json").read_text())
    return golden


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """The user's own cache: native kernels are built once for all sessions."""
    return default_cache_dir()
