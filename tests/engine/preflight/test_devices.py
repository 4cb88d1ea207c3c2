"""What the driver's tool says, and what the options say instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.preflight import devices
from engine.preflight.devices import Device, find_device


def answer(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Put a program in the tool's place."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(devices, "_QUERY", (str(tool),))


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer("NVIDIA H200, 143771, 9.0\\nNVIDIA H200, 143771, 9.0\\n", tmp_path, monkeypatch)
    gpu = Device("cuda", "NVIDIA H200", 143771 * 2**20, 2, (9, 0))
    assert find_device("auto", None) == gpu
    assert find_device("cuda", None) == gpu
    assert find_device("cpu", None) == Device("cpu", "CPU")
    assert find_device("auto", 24 * 2**30) == Device("cuda", "GPU", 24 * 2**30)


@pytest.mark.parametrize(("text", "status"), [("", 0), ("No devices were found", 6), ("what\\n", 0)])
def test_no_gpu(text: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(text, tmp_path, monkeypatch, status)
    assert find_device("auto", None) == Device("cpu", "CPU")
    assert find_device("cuda", None) == Device("cuda", "GPU")


def test_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_QUERY", ("no-such-program-of-ours",))
    assert find_device("auto", None) == Device("cpu", "CPU")
