"""Tokenizer bundles on disk, each a file named by its hash, shared by every gateway on the machine."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from protocol import bundle

log = logging.getLogger(__name__)


class BundleCache:
    """Folder `tokenizers` of the cache. Hashing and disk work (64 MiB at most) run in a thread.

    The disk only saves time: a file that is damaged is ignored and replaced, a folder that cannot
    be written is warned of.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "tokenizers"

    async def load(self, sha256: str) -> bytes | None:
        """The bundle of this hash, None if it is not here whole."""
        return await asyncio.to_thread(self._load, sha256)

    async def store(self, sha256: str, blob: bytes) -> bool:
        """Keep `blob` if its hash is `sha256`; returns whether it is."""
        return await asyncio.to_thread(self._store, sha256, blob)

    def _load(self, sha256: str) -> bytes | None:
        try:
            blob = (self._folder / sha256).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("bundle_not_read", extra={"reason": str(error)})
            return None
        return blob if bundle.sha256(blob) == sha256 else None

    def _store(self, sha256: str, blob: bytes) -> bool:
        if bundle.sha256(blob) != sha256:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Written apart and renamed when whole: readers see all of it or nothing.
            with tempfile.TemporaryDirectory(dir=self._folder) as apart:
                path = Path(apart) / sha256
                path.write_bytes(blob)
                path.replace(self._folder / sha256)
        except OSError as error:
            log.warning("bundle_not_kept", extra={"reason": str(error)})
        return True
