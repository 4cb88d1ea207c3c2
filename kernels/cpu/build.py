"""Builds the native operators with the system's compiler, once for each compiler, CPU and source text."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")

#: No -ffast-math: sums keep their order. No contraction: only what the source fuses is fused.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread")


class BuildError(RuntimeError):
    """The native operators cannot be built or loaded here; the text says why."""


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sluicegate" / "kernels"


def load(cache_dir: Path) -> ctypes.CDLL:
    """The library for this machine, from `cache_dir` or built into it. Raises BuildError."""
    compiler = _compiler()
    path = cache_dir / f"operators-{_key(compiler)}.so"
    try:
        if not path.exists():
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(cache_dir / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _build(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the native operators could not be put in or read from {cache_dir}: {error}") from error


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX names {chosen!r}, which is not an executable command")
        return command
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"there is no C++ compiler ({', '.join(_COMPILERS)}) on PATH")


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = _run([*compiler, "--version"])
    for part in (*compiler, *FLAGS, version, platform.machine(), _cpu_flags()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    """What -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model\t", "flags")
    first_cpu = lines[: lines.index("")] if "" in lines else lines
    return "\n".join(line for line in first_cpu if line.startswith(wanted))


def _build(compiler: list[str], path: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [os.path.join(folder, f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, *FLAGS, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            list(workers.map(_run, commands))
        built = os.path.join(folder, "operators.so")
        _run([*compiler, *FLAGS, "-shared", *objects, "-o", built])
        os.replace(built, path)  # whole or not there, whoever else reads the folder


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command[:1])} did not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout
