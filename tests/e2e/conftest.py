from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.api import Api
from tests.processes import Engine, Server


@pytest.fixture
def start_pair(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server], tiny_models: Path
) -> Callable[..., tuple[Api, Engine]]:
    """`start_pair(model, *engine_flags)` runs an engine with a tiny model (float32, one thread) and a gateway."""

    def start(model: str, *flags: str) -> tuple[Api, Engine]:
        folder = tiny_models / model
        engine = start_engine(str(folder), "--served-model-name=tiny", "--threads=1", *flags)
        gateway = start_gateway(engine.address)
        gateway.wait_until_ready()
        return Api(gateway.url), engine

    return start
