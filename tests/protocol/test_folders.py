from __future__ import annotations

import fcntl
import stat
import tempfile
from pathlib import Path

import pytest

from protocol.folders import private_folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_gone_at_the_end(root: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == root
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
    assert list(root.iterdir()) == []


def test_only_what_has_lost_its_owner_is_removed(root: Path) -> None:
    for name in ("sluicegate-dead", "sluicegate-alive", "sluicegate-no-lock", "other-dead"):
        (root / name).mkdir()
        if name != "sluicegate-no-lock":
            (root / name / "owner.lock").touch()
    with (root / "sluicegate-alive" / "owner.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with private_folder() as mine, private_folder() as another:
            left = {path.name for path in root.iterdir()}
    assert left == {"sluicegate-alive", "sluicegate-no-lock", "other-dead", mine.name, another.name}
