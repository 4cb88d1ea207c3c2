"""The device that a model would run on, found without loading torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_QUERY_S = 5.0

#: The first GPUs that compute bfloat16 (Ampere).
_BFLOAT16_SINCE = (8, 0)

#: The first that convert FP8 (Ada).
_FP8_SINCE = (8, 9)

#: What to do where there is no bfloat16.
USE_HALF = "Use --dtype float16."


@dataclass(frozen=True, slots=True)
class Device:
    """`memory` is in bytes, None where it is not known. `capability` is a GPU's, such as (8, 0)."""

    kind: str  # "cpu" or "cuda"
    name: str
    memory: int | None = None
    count: int = 1
    capability: tuple[int, int] | None = None


def lacks_bfloat16(name: str, capability: tuple[int, int]) -> str | None:
    """What is wrong with bfloat16 on this GPU, one before Ampere; None where nothing is."""
    return _lacks("bfloat16", _BFLOAT16_SINCE, name, capability)


def lacks_fp8(name: str, capability: tuple[int, int]) -> str | None:
    """What is wrong with FP8 on this GPU, one before Ada; None where nothing is."""
    return _lacks("FP8", _FP8_SINCE, name, capability)


def _lacks(dtype: str, since: tuple[int, int], name: str, capability: tuple[int, int]) -> str | None:
    if capability >= since:
        return None
    return (
        f"{dtype} needs a GPU of compute capability {since[0]}.{since[1]} or more; {name} has "
        f"{capability[0]}.{capability[1]}."
    )


def find_device(asked: str, gpu_memory_bytes: int | None) -> Device:
    """The device of --device and --gpu-memory-bytes; what neither says is asked of the driver."""
    if gpu_memory_bytes is not None:
        return Device("cuda", "GPU", gpu_memory_bytes)
    if asked == "cpu":
        return Device("cpu", "CPU")
    gpu = _first_gpu()
    if gpu is not None:
        return gpu
    return Device("cuda", "GPU") if asked == "cuda" else Device("cpu", "CPU")


def _first_gpu() -> Device | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_S, check=True)
        lines = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        name, mebibytes, capability = lines[0]
        major, _, minor = capability.partition(".")
        return Device("cuda", name, int(mebibytes) * 2**20, len(lines), (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
