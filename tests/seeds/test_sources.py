"""The last two parts of the texts' drawing: an instance looks whether it has a model, and else fetches it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.config import EngineConfig
from engine.preflight.start import require_servable
from engine.sources import resolve
from tests.engine.sources.servers import KEY, TOKEN, HubServer, S3Server
from tests.seeds.serving import SHORT


@pytest.fixture
def files(machine: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (machine / "llama-3-8b-awq").iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer(files, large=frozenset())
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


@pytest.fixture
def minio(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server({f"llama/{name}": content for name, content in files.items()}, in_parts=frozenset())
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}"),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", "secret of a test"),
        ("AWS_CONFIG_FILE", os.devnull),
        ("AWS_SHARED_CREDENTIALS_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def fetched(model: str, cache_dir: Path, files: dict[str, bytes]) -> Path:
    """The folder of a model, which is whole and can be served."""
    folder = resolve(model, cache_dir=cache_dir, revision=None, offline=False, progress=lambda *_: None)
    assert {name: (folder / name).read_bytes() == content for name, content in files.items()} == dict.fromkeys(
        files, True
    )
    require_servable(folder, EngineConfig.load([str(folder), "--quantization=awq", *SHORT], {}, prog="engine"))
    return folder


def test_a_hubs_model_is_fetched_once(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    first = fetched(hub.name, tmp_path, files)
    assert hub.fetched("model.safetensors") == 1
    assert fetched(hub.name, tmp_path, files) == first
    assert hub.fetched("model.safetensors") == 1


def test_a_model_of_minio_is_fetched_once(minio: S3Server, files: dict[str, bytes], tmp_path: Path) -> None:
    first = fetched("s3://models/llama", tmp_path, files)
    assert minio.fetched("model.safetensors") == 1
    assert fetched("s3://models/llama", tmp_path, files) == first
    assert minio.fetched("model.safetensors") == 1
