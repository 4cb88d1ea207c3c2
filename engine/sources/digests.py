"""Digests that hubs and object stores publish, computed while a file passes by."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass


class DigestKind(enum.Enum):
    SHA256 = "sha256"
    #: What git calls a blob: sha1 over "blob SIZE\\0" and the content.
    GIT_BLOB = "git blob"
    #: An object store's ETag: md5 of an object that was sent in one piece, ...
    MD5 = "md5"
    #: ... or md5 over the md5s of its parts, "-", and how many there are.
    MD5_OF_PARTS = "md5 of parts"


@dataclass(frozen=True, slots=True)
class Digest:
    """`value` in hex. `part_size` is that of MD5_OF_PARTS, in bytes."""

    kind: DigestKind
    value: str
    part_size: int = 0


class Hasher:
    """sha256 of a file, for our own records, and the digest that its source gave, if any."""

    def __init__(self, expected: Digest | None, size: int) -> None:
        self._expected = expected
        self._sha256 = hashlib.sha256()
        self._other: hashlib._Hash | _PartsHasher | None = None
        match expected:
            case Digest(kind=DigestKind.GIT_BLOB):
                self._other = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            case Digest(kind=DigestKind.MD5):
                self._other = hashlib.md5(usedforsecurity=False)
            case Digest(kind=DigestKind.MD5_OF_PARTS, part_size=part_size):
                self._other = _PartsHasher(part_size)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def update(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        if self._other is not None:
            self._other.update(chunk)

    def mismatch(self) -> str:
        """What is wrong with the content seen so far, as a whole; empty when it is what was expected."""
        if self._expected is None:
            return ""
        found = self.sha256 if self._other is None else self._other.hexdigest()
        if found == self._expected.value:
            return ""
        return f"its {self._expected.kind.value} is {found}, not {self._expected.value}"


class _PartsHasher:
    def __init__(self, part_size: int) -> None:
        assert part_size > 0
        self._part_size = part_size
        self._filled = 0
        self._part = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []

    def update(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            piece = view[: self._part_size - self._filled]
            self._part.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._part_size:
                self._parts.append(self._part.digest())
                self._part, self._filled = hashlib.md5(usedforsecurity=False), 0

    def hexdigest(self) -> str:
        parts = [*self._parts, self._part.digest()] if self._filled else self._parts
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"
