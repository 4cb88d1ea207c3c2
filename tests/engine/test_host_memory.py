"""Memory of the machine or of its control group, and the pool's share of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import host_memory


def test_default_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 4 * 2**30)
    assert host_memory.default_kv_memory_bytes(0) == 2**30
    assert host_memory.default_kv_memory_bytes(2**31) == 2**29
    assert host_memory.default_kv_memory_bytes(2**40) == 0
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 2**40)
    assert host_memory.default_kv_memory_bytes(0) == 2 * 2**30


@pytest.mark.parametrize(
    ("limit", "expected"), [("max\n", 1024 * 1024), ("700000\n", 500000), ("100\n", 0), (None, 1024 * 1024)]
)
def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    1024 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("200000\n")
    assert host_memory.free_memory_bytes() == expected
