"""Private folders for sockets and files that no process needs after the one that made them.

`kill -9` leaves such a folder behind, so the next one that is made removes those whose owner is
gone: an owner holds a lock on a file in its folder, which the kernel frees when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "sluicegate-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder with mode 0700 under the system's temporary one, removed at the end."""
    _remove_stale()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        making = folder / f"{_LOCK}.new"
        with making.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            making.rename(folder / _LOCK)  # who sees it sees it locked
            yield folder


def _remove_stale() -> None:
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or somebody was faster
            if lock_file.parent.stat().st_uid != os.getuid():
                continue
            with lock_file.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent)
