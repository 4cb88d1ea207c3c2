"""Backends by name, and the choice of one. A backend is an entry point of the group
`sluicegate.backends` that names a class satisfying `engine.plan.Runner` whose constructor takes the
`EngineConfig`; docs/backends.md has all of it. It is imported on use, so that a missing optional
package breaks one backend and not the list.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from engine.config import EngineConfig
from engine.loading.store import ModelError, ModelFolder
from engine.plan import LoadError, Runner

log = logging.getLogger("engine")

GROUP = "sluicegate.backends"

#: Ours for a model of a known architecture, else transformers'.
AUTO = "auto"

#: Ours, also found when the project runs from a checkout that is not installed. No other may have these names.
BUILT_IN = {
    "fake": "engine.backends.fake:FakeRunner",
    "torch_runner": "engine.backends.torch_runner:TorchRunner",
    "transformers": "engine.backends.transformers:TransformersRunner",
}

#: Those that serve the folder of a model, and nothing without one.
OF_FOLDERS = frozenset({AUTO, "torch_runner", "transformers"})


class BackendError(LoadError):
    """The backend asked for is not there: the text lists those that are, or says what it lacks."""


def create(config: EngineConfig) -> Runner:
    """The runner that `config.backend` names, not loaded yet. With a `profile_dir` it can be profiled, by signals to
    this process, whose main thread makes it.

    Raises BackendError, and LoadError where the choice hangs on a model that is not there.
    """
    name = _automatic(config.model) if config.backend == AUTO else config.backend
    known = {point.name: point.value for point in entry_points(group=GROUP)} | BUILT_IN
    if name not in known:
        raise BackendError(f"--backend must be one of {', '.join(sorted({AUTO, *known}))}; got {name!r}.")
    module, _, attribute = known[name].partition(":")
    try:
        make: Callable[[EngineConfig], Runner] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"--backend {name} ({known[name]}) cannot be imported: {error}.") from error
    runner = make(config)
    return runner if config.profile_dir is None else _profiled(runner, config.profile_dir)


def _profiled(runner: Runner, folder: Path) -> Runner:
    profile = importlib.import_module("engine.device.profile")  # on use: it imports torch
    profiled: Runner = profile.ProfiledRunner(runner, folder)
    profile.listen(profiled)
    return profiled


def _automatic(model: str | None) -> str:
    """The backend for the model in a folder. Raises ModelError when there is none."""
    if model is None:
        raise ModelError("no model is named; give its folder as --model.")
    architectures = ModelFolder(Path(model)).read_object("config.json").get("architectures")
    names = architectures if isinstance(architectures, list) else []
    ours = importlib.import_module("engine.models").FAMILIES  # on use: it imports torch
    if any(name in ours for name in names):
        return "torch_runner"
    log.warning(
        "backend_fallback",
        extra={
            "backend": "transformers",
            "reason": f"architectures is {names!r}, of which there is no fast form here; this one is slow and right",
        },
    )
    return "transformers"
