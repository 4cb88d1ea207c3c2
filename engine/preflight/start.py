"""The look at a model that an engine takes before it loads anything."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.memory import ONE_DEVICE
from engine.preflight.wanted import Wanted

_LEAVE_IT_OUT = "Leave it out, or set it to 1."


def require_one_device(config: EngineConfig) -> None:
    """Raises ModelError when the model is to be divided. For one that is not here yet: before it is fetched."""
    if config.tensor_parallel_size > 1:
        raise ModelError(f"{ONE_DEVICE.format(config.tensor_parallel_size)} {_LEAVE_IT_OUT}")


def require_servable(folder: Path, config: EngineConfig) -> None:
    """Raises ModelError with every problem there is.

    Whether the model fits is judged for a CPU alone: a GPU's engine measures what a step takes.
    """
    # A GPU's name and memory would be asked of its driver, which takes longer than all the rest.
    device = Device("cpu", "CPU") if config.device == "cpu" else Device("cuda", "GPU")
    report = check(folder, Wanted.by(config, device), name=config.model)
    if config.tensor_parallel_size > 1:
        report.problem("tensor parallel", ONE_DEVICE.format(config.tensor_parallel_size), _LEAVE_IT_OUT)
    if not report.ok:
        raise ModelError(report.error_text())
