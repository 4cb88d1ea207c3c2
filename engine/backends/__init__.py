"""Backends by name. One is an entry point of the group `sluicegate.backends` that names a class
satisfying `engine.plan.Runner` whose constructor takes the `EngineConfig`; it is imported on use,
so that a missing optional package breaks one backend and not the list.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from engine.config import EngineConfig
from engine.plan import Runner

GROUP = "sluicegate.backends"

#: Ours, also found when the project runs from a checkout that is not installed.
BUILT_IN = {
    "fake": "engine.backends.fake:FakeRunner",
    "torch_runner": "engine.backends.torch_runner:TorchRunner",
}


class UnknownBackend(ValueError):
    """No backend has the name asked for; the text lists those there are."""


def create(config: EngineConfig) -> Runner:
    """The runner that `config.backend` names, not loaded yet. Raises UnknownBackend."""
    known = BUILT_IN | {point.name: point.value for point in entry_points(group=GROUP)}
    if config.backend not in known:
        raise UnknownBackend(f"--backend must be one of {', '.join(sorted(known))}; got {config.backend!r}.")
    module, _, name = known[config.backend].partition(":")
    make: Callable[[EngineConfig], Runner] = getattr(importlib.import_module(module), name)
    return make(config)
