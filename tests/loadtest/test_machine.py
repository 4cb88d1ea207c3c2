import os
import platform
import subprocess
from pathlib import Path

import pytest

from loadtest import machine
from loadtest.machine import Code, read_code, read_hardware, read_versions


def test_hardware_is_this_machine() -> None:
    hardware = read_hardware()
    assert hardware.cpu != "unknown"
    assert hardware.num_cpus == len(os.sched_getaffinity(0))
    total_kib = int(Path("/proc/meminfo").read_text().split("\n")[0].split()[1])
    assert hardware.memory_gib == pytest.approx(total_kib / 2**20, abs=0.1)


def test_versions_are_read_without_imports() -> None:
    versions = read_versions()
    assert versions["python"] == platform.python_version()
    assert "httptools" in versions
    assert "no-such-package" not in versions


def test_code_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert read_code() == Code(None, None)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init")
    tracked = tmp_path / "tracked"
    tracked.write_text("1")
    git("add", "tracked")
    git("commit", "-m", "first")
    (tmp_path / "untracked.json").write_text("{}")
    assert read_code() == Code(git("rev-parse", "HEAD"), False)
    tracked.write_text("2")
    assert read_code() == Code(git("rev-parse", "HEAD"), True)
