"""Models on this machine's disk: whole or absent, whatever happens on the way.

CACHE_DIR/models/hub/ORGANIZATION/NAME/     one folder for each model; `s3/BUCKET/PREFIX` alike
    VERSION/                                a version, with the files and .manifest.json
    .VERSION.partial/                       one on its way: it gets the other name when it is whole
    .versions.json                          what a revision ("main") was when it was last looked up
    .lock                                   held by the one process that fetches or removes
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.sources.reference import Reference

MANIFEST = ".manifest.json"
_REVISIONS = ".versions.json"
_LOCK = ".lock"
_PARTIAL = ".partial"
_NEW = ".new"

_POLL_S = 0.1
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of a version, as it was when its digest had been checked. `sha256` in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of. `model` is what the operator calls it."""

    model: str
    revision: str
    version: str
    files: dict[str, CachedFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def write(self, folder: Path) -> None:
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        content = {"model": self.model, "revision": self.revision, "version": self.version, "files": files}
        _replace(folder / MANIFEST, json.dumps(content, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """That of a version's folder; None where there is none, or none that can be read."""
        try:
            content = json.loads((folder / MANIFEST).read_text("utf-8"))
            files = {str(name): CachedFile(int(f["size"]), str(f["sha256"])) for name, f in content["files"].items()}
            return cls(str(content["model"]), str(content["revision"]), str(content["version"]), files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class CachedModel:
    """The folder of one model, all its versions."""

    def __init__(self, cache_dir: Path, reference: Reference) -> None:
        self.folder = cache_dir / "models" / reference.folder
        self._reference = reference

    def version(self, version: str) -> Path | None:
        """The folder of a version that is here and whole."""
        folder = self.folder / version
        return folder if folder.is_dir() else None

    def latest(self) -> Path | None:
        """The version that the revision was when it was last looked up, if that is here."""
        revision = self._reference.revision
        return self.version(self._revisions().get(revision, revision))

    def remember(self, version: str) -> None:
        """Note what the revision is now."""
        revisions = self._revisions()
        if revisions.get(self._reference.revision) != version:
            _replace(self.folder / _REVISIONS, json.dumps(revisions | {self._reference.revision: version}))

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Be the one process that changes this model; others wait. The kernel frees it when the process dies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / _LOCK, on_wait):
            yield

    def staging(self, version: str) -> Path:
        """The folder that a version is put together in. Those of other versions are removed."""
        staging = self.folder / f".{version}{_PARTIAL}"
        for other in self.folder.glob(f".*{_PARTIAL}"):
            if other != staging:
                shutil.rmtree(other)
        staging.mkdir(exist_ok=True)
        return staging

    def publish(self, staging: Path, version: str) -> Path:
        """Give a version that is whole its name; what a writer that was killed left beside its files goes."""
        target = self.folder / version
        for left in staging.glob(f"*{_NEW}"):
            left.unlink()
        _sync(staging)
        staging.rename(target)
        _sync(self.folder)
        return target

    def remove(self, version: str) -> None:
        """Take a version away: at once, then its files."""
        gone = self.folder / f".{version}{_PARTIAL}"
        shutil.rmtree(gone, ignore_errors=True)
        (self.folder / version).rename(gone)
        shutil.rmtree(gone)
        left = {name: at for name, at in self._revisions().items() if at != version}
        _replace(self.folder / _REVISIONS, json.dumps(left))

    def _revisions(self) -> dict[str, str]:
        try:
            content = json.loads((self.folder / _REVISIONS).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(name): str(at) for name, at in content.items()} if isinstance(content, dict) else {}


def cached_versions(cache_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    """Every whole version in the cache, by path."""
    for file in sorted((cache_dir / "models").glob(f"*/*/*/*/{MANIFEST}")):
        manifest = Manifest.read(file.parent)
        if manifest is not None and not file.parent.name.startswith("."):
            yield file.parent, manifest


def damage(folder: Path, manifest: Manifest, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with a version's files, one sentence each; every byte is read."""
    for name, expected in manifest.files.items():
        path, sha256 = folder / name, hashlib.sha256()
        if not path.is_file():
            yield f"{name} is missing"
            continue
        if (size := path.stat().st_size) != expected.size:
            yield f"{name} has {size} bytes instead of {expected.size}"
            continue
        with path.open("rb") as stream:
            while chunk := stream.read(_READ_BYTES):
                sha256.update(chunk)
                on_bytes(len(chunk))
        if sha256.hexdigest() != expected.sha256:
            yield f"{name} has the sha256 {sha256.hexdigest()} instead of {expected.sha256}"


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which stays; `on_wait` is called while another holds it."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(_POLL_S)
        yield


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}{_NEW}")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
