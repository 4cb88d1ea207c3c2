"""An engine's way from its command line to tokens, in this process: first look, backend, load, steps."""

from __future__ import annotations

from pathlib import Path

from engine import backends
from engine.config import EngineConfig
from engine.plan import ModelInfo
from engine.preflight.start import require_servable
from protocol.sampling import SamplingParams
from tests.engine.sequences import Sequence
from tests.engine.torch_runners import driver

#: A small machine: one thread, a device that is always there, a context that it has memory for.
HERE = ("--device=cpu", "--threads=1", "--kv-cache-memory-bytes=64MiB")
SHORT = (*HERE, "--max-model-len=512")

#: The prompt of all of them.
PROMPT = (5, 6, 7)


def served(words: list[str], num_tokens: int = 8, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], ModelInfo]:
    """Greedy tokens after a prompt, and what was loaded. Raises LoadError for what an engine would not start with."""
    config = EngineConfig.load(words, {}, prog="sluicegate engine")
    assert config.model is not None
    require_servable(Path(config.model), config)
    runner = backends.create(config)
    info = runner.load(lambda *_: None)
    greedy = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
    (ids,) = driver(runner, info).run([Sequence(list(prompt), greedy, ends=(2,))])  # type: ignore[arg-type]
    runner.close()
    return ids, info
