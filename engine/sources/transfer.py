"""One file, from a source onto the disk: continued where it broke off, its digest checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from engine.sources.digests import Digest, Hasher
from engine.sources.remote import Interrupted, RemoteFile, Source, SourceError, Unreachable

#: Tries in a row that bring not one byte, and the pauses between them: 0.5, 1, 2, 4, 8 s.
MAX_STALLS = 6
FIRST_PAUSE_S = 0.5

#: Times that a file is fetched anew because its content was not what its source said.
_MAX_MISMATCHES = 2

_READ_BYTES = 2**20

#: Called with the number of bytes that a file got; negative when some are thrown away.
OnBytes = Callable[[int], None]


class Cancelled(Exception):
    """Another file of the same model failed, or the operator had enough."""


def fetch(source: Source, file: RemoteFile, path: Path, on_bytes: OnBytes, cancelled: threading.Event) -> str:
    """Bring `file` to `path`, where a part of it may lie from an earlier try; its sha256 in hex.

    Raises SourceError when it cannot be had, Cancelled, and OSError of the disk.
    """
    digest = _digest(source, file, cancelled)
    reason = ""
    for _ in range(_MAX_MISMATCHES):
        with _Download(source, file, path, digest, on_bytes) as download:
            download.resume()
            download.run(cancelled)
            reason = download.mismatch()
            if not reason:
                return download.sha256
            download.restart()
    raise SourceError(f"{file.name} came {_MAX_MISMATCHES} times with wrong content: {reason}. It was not kept.")


def _digest(source: Source, file: RemoteFile, cancelled: threading.Event) -> Digest | None:
    for stalls in range(MAX_STALLS - 1):
        try:
            return source.digest(file)
        except Unreachable:
            if cancelled.wait(FIRST_PAUSE_S * 2**stalls):
                raise Cancelled from None
    return source.digest(file)


class _Download:
    """A file on its way. What is on the disk has passed through the hasher."""

    def __init__(self, source: Source, file: RemoteFile, path: Path, digest: Digest | None, on_bytes: OnBytes) -> None:
        self._source = source
        self._file = file
        self._digest = digest
        self._on_bytes = on_bytes
        self._hasher = Hasher(digest, file.size)
        self._done = 0
        self._stream = path.open("r+b" if path.exists() else "w+b")

    def __enter__(self) -> _Download:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def sha256(self) -> str:
        return self._hasher.sha256

    def mismatch(self) -> str:
        return self._hasher.mismatch()

    def resume(self) -> None:
        """Take over what an earlier try left."""
        if os.fstat(self._stream.fileno()).st_size > self._file.size:
            self._stream.truncate(0)
        while chunk := self._stream.read(_READ_BYTES):
            self._took(chunk)

    def restart(self) -> None:
        """Throw away what is there."""
        self._stream.seek(0)
        self._stream.truncate()
        self._on_bytes(-self._done)
        self._hasher, self._done = Hasher(self._digest, self._file.size), 0

    def run(self, cancelled: threading.Event) -> None:
        """Fetch what is missing, with as many connections as it takes."""
        stalls, furthest = 0, self._done
        while self._done < self._file.size:
            try:
                self._receive(cancelled)
            except Interrupted as error:
                stalls = stalls + 1 if self._done <= furthest else 0
                furthest = max(furthest, self._done)
                if stalls == MAX_STALLS:
                    raise Unreachable(
                        f"{self._file.name} broke off at byte {self._done} of {self._file.size}, and {MAX_STALLS} "
                        f"tries brought no more: {error}. What was fetched is kept; the next try goes on from there."
                    ) from error
                if stalls and cancelled.wait(FIRST_PAUSE_S * 2 ** (stalls - 1)):
                    raise Cancelled from error
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _receive(self, cancelled: threading.Event) -> None:
        """Over one connection. Raises Interrupted unless the file is whole afterwards."""
        if cancelled.is_set():
            raise Cancelled
        with self._source.open(self._file, self._done) as transfer:
            if transfer.start != self._done:
                self.restart()
            for chunk in transfer.chunks:
                if cancelled.is_set():
                    raise Cancelled
                if self._done + len(chunk) > self._file.size:
                    self.restart()
                    raise Interrupted(f"there is more of it than the {self._file.size} bytes announced")
                self._stream.write(chunk)
                self._took(chunk)
        if self._done < self._file.size:
            raise Interrupted("the connection ended early")

    def _took(self, chunk: bytes) -> None:
        self._hasher.update(chunk)
        self._done += len(chunk)
        self._on_bytes(len(chunk))
