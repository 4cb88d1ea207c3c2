"""A model from its source into the cache: listed, chosen, fetched, checked, published."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.plan import Progress
from engine.sources.cache import CachedFile, CachedModel, Manifest
from engine.sources.reference import Reference
from engine.sources.remote import Listing, RemoteFile, Source, SourceError, Unreachable
from engine.sources.selection import MAX_INDEX_BYTES, select
from engine.sources.transfer import fetch

log = logging.getLogger(__name__)

#: Files fetched at a time: one connection seldom fills a line.
NUM_CONNECTIONS = 4

#: Between the tries to list a model.
LOOKUP_PAUSES_S = (0.5, 1.0)

_PROGRESS_S = 0.1
_PART = ".part"


def pull(source: Source, reference: Reference, model: CachedModel, progress: Progress) -> Path:
    """The folder of what `reference` is now; fetched unless it is in the cache. Raises SourceError.

    Of several processes one fetches and the others wait. Where the source does not answer, the version
    that it had last will do.
    """
    progress(f"looking up {reference}", 0, 0)
    try:
        listing = _look_up(source)
    except Unreachable as error:
        folder = model.latest()
        if folder is None:
            raise
        log.warning("source_unreachable", extra={"model": str(reference), "reason": str(error), "used": folder.name})
        return folder
    folder = model.version(listing.version)
    if folder is not None:
        with contextlib.suppress(OSError):  # a cache that is shared may be one to read only
            model.remember(listing.version)
        return folder
    try:
        with model.locked(lambda: progress(f"waiting for another process that fetches {reference}", 0, 0)):
            folder = model.version(listing.version) or _fetch(source, reference, model, listing, progress)
            model.remember(listing.version)
            return folder
    except OSError as error:
        raise SourceError(
            f"{reference} cannot be put into {model.folder}: {error.strerror or error}. What was fetched is kept. "
            "Make room or name another folder with --cache-dir."
        ) from error


def _look_up(source: Source) -> Listing:
    for pause_s in LOOKUP_PAUSES_S:
        try:
            return source.listing()
        except Unreachable:
            time.sleep(pause_s)
    return source.listing()


def _fetch(source: Source, reference: Reference, model: CachedModel, listing: Listing, progress: Progress) -> Path:
    staging = model.staging(listing.version)
    manifest = Manifest.read(staging) or Manifest(str(reference), reference.revision, listing.version, {})
    try:
        batch = _Batch(source, staging, manifest)
        files = select(listing.files, batch.read)
        batch.check_space(files)
        batch.run(files, lambda done, total: progress(f"fetching {reference}", done, total))
    except SourceError as error:
        raise type(error)(f"{reference}: {error}") from error
    return model.publish(staging, listing.version)


class _Batch:
    """Fetches files into a folder and notes in its manifest those that are whole."""

    def __init__(self, source: Source, folder: Path, manifest: Manifest) -> None:
        self._source = source
        self._folder = folder
        self._manifest = manifest
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._done = 0

    def read(self, file: RemoteFile) -> bytes:
        """The content of one file, which is fetched now."""
        if file.size > MAX_INDEX_BYTES:
            raise SourceError(f"{file.name} has {file.size} bytes; an index of at most {MAX_INDEX_BYTES} is read.")
        if not self._is_whole(file):
            self._note(file, self._fetch(file))
        return (self._folder / file.name).read_bytes()

    def check_space(self, files: Sequence[RemoteFile]) -> None:
        """Raises SourceError when the disk is too small for what is missing."""
        needed = sum(file.size - self._on_disk(file) for file in files)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise SourceError(
                f"{needed} bytes are to be fetched, and the disk of {self._folder} has {free} free. Make room there, "
                "for example with `sluicegate models remove`, or name another folder with --cache-dir."
            )

    def run(self, files: Sequence[RemoteFile], progress: Callable[[int, int], None]) -> None:
        """Fetch those that are not there. Raises the first error, when the other transfers have stopped."""
        missing = [file for file in files if not self._is_whole(file)]
        total = sum(file.size for file in files)
        self._done = total - sum(file.size for file in missing)
        with concurrent.futures.ThreadPoolExecutor(NUM_CONNECTIONS, "fetch") as pool:
            running = {pool.submit(self._fetch, file): file for file in missing}
            try:
                while running:
                    finished, _ = concurrent.futures.wait(
                        running, _PROGRESS_S, concurrent.futures.FIRST_COMPLETED
                    )  # in slices, so that a signal is heard
                    progress(self._done, total)
                    for future in finished:
                        self._note(running.pop(future), future.result())
            finally:
                self._cancelled.set()  # a no-op when all are done
                for future in running:
                    future.cancel()

    def _is_whole(self, file: RemoteFile) -> bool:
        path, noted = self._folder / file.name, self._manifest.files.get(file.name)
        return noted is not None and noted.size == file.size and path.is_file() and path.stat().st_size == file.size

    def _on_disk(self, file: RemoteFile) -> int:
        """Bytes of it that are there already."""
        for path in (self._folder / file.name, self._folder / (file.name + _PART)):
            if path.is_file():
                return min(path.stat().st_size, file.size)
        return 0

    def _fetch(self, file: RemoteFile) -> str:
        part = self._folder / (file.name + _PART)
        sha256 = fetch(self._source, file, part, self._count, self._cancelled)
        part.rename(self._folder / file.name)
        return sha256

    def _note(self, file: RemoteFile, sha256: str) -> None:
        self._manifest.files[file.name] = CachedFile(file.size, sha256)
        self._manifest.write(self._folder)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
