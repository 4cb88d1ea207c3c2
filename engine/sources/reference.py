"""What an operator may name as a model: a folder, a model of a hub, or a folder in an object store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from engine.sources.remote import SourceError

#: The revision of a hub's model where none is named, as on every hub.
DEFAULT_REVISION = "main"

_S3 = "s3://"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class HubReference:
    """`name` is "organization/model"; `revision` a branch, tag or commit."""

    name: str
    revision: str

    @property
    def folder(self) -> Path:
        """Where its versions lie, below the cache's folder of models."""
        return Path("hub") / self.name

    def __str__(self) -> str:
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class S3Reference:
    """The objects of `bucket` directly below `prefix`, which has no slash at its ends and may be empty."""

    bucket: str
    prefix: str

    #: An object store has no branches: there is what it holds now.
    revision = "now"

    @property
    def folder(self) -> Path:
        # One folder a prefix, so that the prefixes "a" and "a/b" do not lie inside each other.
        return Path("s3") / self.bucket / (quote(self.prefix, safe="") or "%")

    def __str__(self) -> str:
        return f"{_S3}{self.bucket}/{self.prefix}".rstrip("/")


Reference = HubReference | S3Reference


def parse_reference(model: str, revision: str | None = None) -> Path | Reference:
    """What `model` names. A folder that exists wins over a hub's model of the same name.

    `revision` is --revision; "organization/model@revision" says the same. Raises SourceError.
    """
    if model.startswith(_S3):
        return _s3(model, revision)
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise SourceError(f"--revision {revision}: {model} is a folder, which has no revisions. Leave it out.")
        return path
    name, at, inline = model.partition("@")
    if not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        return path  # whoever opens it says that it is not there
    if at and revision is not None and inline != revision:
        raise SourceError(f"{model} and --revision {revision} name two revisions. Give one of them.")
    chosen = inline if at else revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(chosen) or ".." in chosen:
        raise SourceError(f"the revision {chosen!r} of {name} is not a branch, tag or commit.")
    return HubReference(name, chosen)


def _s3(model: str, revision: str | None) -> S3Reference:
    bucket, _, prefix = model.removeprefix(_S3).partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise SourceError(f"{model}: {bucket!r} is not a bucket's name. Write s3://BUCKET/PREFIX.")
    if len(quote(prefix, safe="")) > 255 or {".", ".."} & set(prefix.split("/")):
        raise SourceError(f"{model}: the prefix must be at most 255 characters, none of its parts '.' or '..'.")
    if revision is not None:
        raise SourceError(f"--revision {revision}: {model} has no revisions. Name another prefix instead.")
    return S3Reference(bucket, prefix)
