"""A model as files, the servers that have it, and no pauses between tries."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.sources import pulling, transfer
from tests.engine.sources.servers import KEY, TOKEN, CuttingProxy, HubServer, S3Server

SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
NEEDED = frozenset(("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json", *SHARDS))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pulling, "LOOKUP_PAUSES_S", (0.001,) * 10)


@pytest.fixture(scope="session")
def model_files() -> dict[str, bytes]:
    """What a hub has of a model: 370 kB that are needed, and more that are not."""
    rng = random.Random(1)
    shards = dict(zip(SHARDS, (rng.randbytes(size) for size in (150_000, 130_000, 90_001)), strict=True))
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(SHARDS)}}
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **shards,
        "consolidated.safetensors": rng.randbytes(1000),
        "pytorch_model.bin": rng.randbytes(1000),
        "README.md": b"# Tiny",
        ".gitattributes": b"",
    }


@pytest.fixture
def hub(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer(dict(model_files), large=frozenset(SHARDS))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


@pytest.fixture
def s3(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    files = {f"team/tiny/{name}": content for name, content in model_files.items()}
    server = S3Server(
        files | {"team/tiny/checkpoints/old.safetensors": b"old", "team/tiny2/config.json": b"{}"},
        in_parts=frozenset(f"team/tiny/{name}" for name in SHARDS[:2]),
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret of a test")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield server
    server.close()


@pytest.fixture
def cutting() -> Iterator[Callable[..., CuttingProxy]]:
    """`cutting(port, most, seed)` is a proxy in front of a server."""
    proxies: list[CuttingProxy] = []

    def start(port: int, *, most: int, seed: int) -> CuttingProxy:
        proxies.append(CuttingProxy(port, most, seed))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()
