"""Where models come from: a folder, a hub, an object store, each ending as a folder on this disk.

    folder = resolve("org/model", cache_dir=..., revision=None, offline=False, progress=...)

`reference` reads what the operator wrote, `hub` and `s3` are the places (`remote` is their seam),
`selection` knows which files a model needs, `transfer` brings one of them, `cache` keeps what came,
`pulling` joins these. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.plan import Progress
from engine.sources.cache import CachedModel
from engine.sources.pulling import pull
from engine.sources.reference import HubReference, Reference, parse_reference
from engine.sources.remote import Source, SourceError


def resolve(model: str, *, cache_dir: Path, revision: str | None, offline: bool, progress: Progress) -> Path:
    """The folder of a model, fetched into the cache when it is named by a source and not there yet.

    A path is returned as it is, whether there is something or not. Raises SourceError.
    """
    reference = parse_reference(model, revision)
    if isinstance(reference, Path):
        return reference
    cached = CachedModel(cache_dir, reference)
    if offline:
        folder = cached.latest()
        if folder is None:
            raise SourceError(
                f"{reference} is not in {cached.folder}, and --offline forbids to fetch it. Run `sluicegate models "
                f"pull {reference}` where there is a network, or name a folder that holds the model."
            )
        return folder
    # A commit that is here cannot have changed.
    folder = cached.version(reference.revision)
    if folder is not None:
        return folder
    with _source_of(reference) as source:
        return pull(source, reference, cached, progress)


@contextlib.contextmanager
def _source_of(reference: Reference) -> Iterator[Source]:
    """The place of a model. What only it needs is imported here."""
    if isinstance(reference, HubReference):
        from engine.sources.hub import HubSource

        with contextlib.closing(HubSource(reference)) as hub:
            yield hub
        return
    try:
        from engine.sources.s3 import S3Source
    except ModuleNotFoundError as error:
        raise SourceError(f"{reference} needs the botocore package: pip install 'sluicegate[s3]'.") from error
    with contextlib.closing(S3Source(reference)) as s3:
        yield s3
