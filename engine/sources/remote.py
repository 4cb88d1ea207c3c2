"""The seam between the cache and the places that models come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from engine.plan import LoadError
from engine.sources.digests import Digest


class SourceError(LoadError):
    """The model cannot be had from there. The text says why and what to do; another try changes nothing."""


class Unreachable(SourceError):
    """Not now: nobody answers there, or it breaks off. What is in the cache may stand in, and another try may help."""


class Interrupted(Exception):
    """A transfer broke off; it can be continued."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model. `tag` is the source's own name of this content."""

    name: str
    size: int
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of one version of a model, by name. Equal versions have equal content."""

    version: str
    files: Mapping[str, RemoteFile]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Content of a file from byte `start` on. Iterating raises Interrupted when the connection breaks."""

    start: int
    chunks: Iterator[bytes]


class Source(Protocol):
    """One model in one place. Called from several threads at once."""

    def listing(self) -> Listing:
        """Raises SourceError, and Unreachable where another try may help."""
        ...

    def digest(self, file: RemoteFile) -> Digest | None:
        """What the content's digest must be; None where the place does not say. Raises as `listing`."""
        ...

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[Transfer]:
        """The content from `start` < `file.size` on, or from 0 where the place cannot continue.

        Entering raises Interrupted or SourceError.
        """
        ...
