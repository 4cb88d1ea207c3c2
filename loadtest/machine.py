"""Where a number was measured: hardware, versions, and the state of the code."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = ("sluicegate", "torch", "triton", "transformers", "pyzmq", "uvicorn", "uvloop", "httptools", "vllm")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The client's machine; it is the server's too when the URL is a loopback address."""

    cpu: str
    num_cpus: int  # that this process may run on
    instruction_sets: list[str]  # of those that decide how fast, and with which bits, a CPU engine computes
    memory_gib: float
    gpus: list[str]
    system: str


@dataclass(frozen=True, slots=True)
class Code:
    """The checkout that the load generator runs from; `commit` is None outside of one."""

    commit: str | None
    dirty: bool | None  # a tracked file differs from the commit


def read_hardware() -> Hardware:
    cpu, flags = "unknown", set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
    interesting = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    return Hardware(
        cpu=cpu,
        num_cpus=len(os.sched_getaffinity(0)),
        instruction_sets=[name for name in interesting if name in flags],
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        gpus=_read_gpus(),
        system=platform.platform(),
    )


def read_versions() -> dict[str, str]:
    """Of Python and of the installed packages that matter; read from metadata, nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def read_code() -> Code:
    folder = Path(__file__).resolve().parent
    git = shutil.which("git")
    commit = _git(git, folder, "rev-parse", "HEAD") if git else None
    if git is None or commit is None:
        return Code(None, None)
    # Untracked files do not count: the results of the runs before this one are among them.
    status = _git(git, folder, "status", "--porcelain", "--untracked-files=no")
    return Code(commit, None if status is None else status != "")


def _git(git: str, folder: Path, *arguments: str) -> str | None:
    done = subprocess.run([git, "-C", folder, *arguments], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


def _read_gpus() -> list[str]:
    """Names from the NVIDIA driver's own files."""
    models = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in information.read_text().splitlines():
            if line.startswith("Model:"):
                models.append(line.partition(":")[2].strip())
    return models
