"""Which implementation runs: native code built for this CPU, or the plain-torch references.

Owns that one choice, the number of threads and the name of the numerics. Operators ask `native()`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock

import torch

from kernels.cpu import build
from kernels.cpu.library import Library

#: Raised whenever an operator may change a bit of its result.
NUMERICS = 1

_log = logging.getLogger(__name__)


class Implementation(enum.Enum):
    """The two forms every operator has on a CPU. Their bits differ."""

    NATIVE = "native"
    REFERENCE = "reference"


class _Choice:
    """The implementation in force. One instance; `chosen` is None until `start` or a first use."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.chosen: Implementation | None = None
        self.library: Library | None = None  # loaded once, kept when the choice changes
        self.warned = False


_choice = _Choice()
_recorder: ContextVar[Library | None] = ContextVar("recorder", default=None)


def start(implementation: Implementation | None = None, cache_dir: Path | None = None) -> Implementation:
    """Choose the implementation, building the native one if needed; answers what runs.

    None asks for native code, and falls back to the references with one warning when it cannot be
    built. `Implementation.NATIVE` raises RuntimeError instead. `cache_dir` holds built libraries
    (default: `$XDG_CACHE_HOME/sluicegate/kernels`). Weights are packed for the implementation in
    force, so call this before packing; an operator used before any call starts with the defaults.
    The references set torch to one thread.
    """
    with _choice.lock:
        if implementation is not Implementation.REFERENCE and _choice.library is None:
            try:
                library = Library(cache_dir or build.default_cache_dir())
            except build.BuildError as error:
                if implementation is Implementation.NATIVE:
                    raise
                if not _choice.warned:
                    _log.warning("CPU operators run as plain torch, several times slower: %s", error)
                    _choice.warned = True
            else:
                library.set_num_threads(torch.get_num_threads())
                _choice.library = library
        loaded = implementation is not Implementation.REFERENCE and _choice.library is not None
        _choice.chosen = Implementation.NATIVE if loaded else Implementation.REFERENCE
        if not loaded:
            torch.set_num_threads(1)  # torch's matrix product gives other bits with other numbers of threads
        return _choice.chosen


def native() -> Library | None:
    """The native operators when they are in force, None when the references are."""
    recorder = _recorder.get()
    if recorder is not None:
        return recorder
    chosen = _choice.chosen or start()
    return _choice.library if chosen is Implementation.NATIVE else None


@contextmanager
def recording(recorder: Library) -> Iterator[None]:
    """Within it this thread's operators call `recorder` (`kernels.program`)."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def numerics_name() -> str:
    """What decides the bits of results here: implementation, its number, flags. Part of the numerics hash."""
    if native() is not None:
        return f"native-{NUMERICS} {' '.join(build.FLAGS)}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"reference-{NUMERICS} torch-{torch.__version__} {capability}"


def set_num_threads(count: int) -> None:
    """Number of threads for the native operators, the calling one included. Results do not depend on it.

    They have threads of their own: leave torch at one, whose idle threads wait by spinning. The
    references always run on one thread.
    """
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, got {count}.")
    library = native()
    if library is not None:
        library.set_num_threads(count)


def num_threads() -> int:
    """Number of threads of the operators in force, the calling one included."""
    library = native()
    return 1 if library is None else library.num_threads()
