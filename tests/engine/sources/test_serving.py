"""An engine that is given the name of a hub's model fetches and serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from engine.sources.cache import cached_versions
from protocol.messages import Hello, Phase, Role, Welcome
from tests.engine.peer import Peer
from tests.engine.sources.servers import HubServer
from tests.processes import Engine


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_engine_serves_a_model_of_a_hub(
    hub: HubServer,
    tiny_models: Path,
    kernel_cache: Path,
    start_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = tiny_models / "llama_sharded"
    hub.files.clear()
    hub.files |= {file.name: file.read_bytes() for file in model.iterdir()}
    hub.large = frozenset(name for name in hub.files if name.endswith("00002-of-00006.safetensors"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernel_cache / "kernels")  # built already
    flags = (hub.name, "--device=cpu", "--threads=1", f"--cache-dir={cache}")
    engine = start_engine(*flags)
    assert served_by(engine) == hub.name
    assert [manifest.model for _, manifest in cached_versions(cache)] == [hub.name]
    again = start_engine(*flags, "--offline")
    assert served_by(again) == hub.name


def served_by(engine: Engine) -> str:
    """The name of the model, when it is loaded."""
    with zmq.Context() as context, Peer(context, engine.address) as peer:
        peer.say(Hello((1, 0), Role.GATEWAY, "peer", "test"))
        welcome = peer.hear(Welcome, lambda message: message.phase is Phase.SERVING, timeout_s=50)
        assert welcome.serving is not None
        return welcome.serving.model
