"""`sluicegate models`: what is in the cache, and what gets into it and out of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from engine.plan import LoadError
from engine.sources import resolve
from engine.sources.cache import CachedModel, Manifest, cached_versions, damage
from engine.sources.reference import parse_reference
from engine.sources.remote import SourceError
from protocol import logs
from protocol.config import Positional, Settings, Spelled
from protocol.progress import ProgressBar

_PROG = "sluicegate models"

#: Status of a process that SIGINT ended, as shells have it.
_INTERRUPTED = 130


class ListConfig(Settings):
    """List the models in the cache."""

    as_json: Annotated[bool, Spelled("--json")] = Field(False, description="Print the list as JSON.")


class ModelConfig(Settings):
    """Fetch a model into the cache, check it there, or remove it."""

    model: Annotated[str, Positional()] = Field(description="ORG/NAME[@REVISION] of a hub, or s3://BUCKET/PREFIX.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub's model.")


def main(argv: Sequence[str]) -> int:
    """0 when done, 1 when it cannot be, 2 for a command that is none."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] not in _COMMANDS:
        sys.stderr.write(f"{_PROG}: unknown command {words[0]!r}.\n{_usage()}\n")
        return 2
    run, _ = _COMMANDS[words[0]]
    try:
        return run(words[1:])
    except LoadError as error:
        sys.stderr.write(f"{_PROG} {words[0]}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{_PROG} {words[0]}: stopped; what was fetched is kept.\n")
        return _INTERRUPTED


def _pull(argv: Sequence[str]) -> int:
    config = ModelConfig.from_command_line(argv, prog=f"{_PROG} pull")
    logs.configure("warning", config.log_format)
    _cached(config)  # refuses what is no model of a source
    bar = ProgressBar()
    try:
        folder = resolve(
            config.model, cache_dir=config.cache_dir, revision=config.revision, offline=False, progress=bar
        )
    finally:
        bar.close()
    print(folder)
    return 0


def _list(argv: Sequence[str]) -> int:
    config = ListConfig.from_command_line(argv, prog=f"{_PROG} list")
    rows = [
        {"model": manifest.model, "version": manifest.version, "bytes": manifest.num_bytes, "folder": str(folder)}
        for folder, manifest in cached_versions(config.cache_dir)
    ]
    if config.as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"No models in {config.cache_dir / 'models'}.")
        return 0
    width = max(len(str(row["model"])) for row in rows)
    for row in rows:
        print(f"{row['model']:<{width}}  {str(row['version'])[:12]}  {int(row['bytes']) / 1e9:8.2f} GB")  # type: ignore[call-overload]
    return 0


def _check(argv: Sequence[str]) -> int:
    config = ModelConfig.from_command_line(argv, prog=f"{_PROG} check")
    found = []
    for folder, manifest in _versions(config):
        bar, done = ProgressBar(), 0

        def count(num_bytes: int, bar: ProgressBar = bar, manifest: Manifest = manifest) -> None:
            nonlocal done
            done += num_bytes
            bar(f"reading {manifest.model}", done, manifest.num_bytes)

        started = time.monotonic()
        problems = list(damage(folder, manifest, count))
        bar.close()
        found += [f"{folder}: {problem}." for problem in problems]
        if not problems:
            speed = manifest.num_bytes / 1e6 / max(time.monotonic() - started, 1e-6)
            print(f"{manifest.model} {manifest.version[:12]}: {len(manifest.files)} files are whole ({speed:.0f} MB/s)")
    if found:
        found.append(f"Run `{_PROG} remove {config.model}` and `{_PROG} pull {config.model}`.")
        sys.stderr.write("".join(f"{_PROG} check: {line}\n" for line in found))
    return 1 if found else 0


def _remove(argv: Sequence[str]) -> int:
    config = ModelConfig.from_command_line(argv, prog=f"{_PROG} remove")
    for folder, manifest in _versions(config):
        model = _cached(config)
        with model.locked(lambda: None):
            model.remove(folder.name)
        print(f"{manifest.model} {manifest.version[:12]}: removed, {manifest.num_bytes / 1e9:.2f} GB")
    return 0


def _versions(config: ModelConfig) -> Iterator[tuple[Path, Manifest]]:
    """The versions of the model that are in the cache: all, or the one of the revision named. Raises SourceError."""
    model = _cached(config)
    named = config.revision is not None or "@" in config.model
    only = model.latest() if named else None
    found = [
        (folder, manifest)
        for folder, manifest in cached_versions(config.cache_dir)
        if folder.parent == model.folder and (folder == only or not named)
    ]
    if not found:
        raise SourceError(f"{config.model} is not in {config.cache_dir / 'models'}. `{_PROG} list` says what is.")
    yield from found


def _cached(config: ModelConfig) -> CachedModel:
    reference = parse_reference(config.model, config.revision)
    if isinstance(reference, Path):
        raise SourceError(f"{config.model} is no model of a hub or object store; write ORG/NAME or s3://BUCKET/PREFIX.")
    return CachedModel(config.cache_dir, reference)


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "pull": (_pull, "fetch a model, or what is missing of it"),
    "list": (_list, "the models in the cache"),
    "check": (_check, "read a model's files and compare their digests"),
    "remove": (_remove, "take a model out of the cache"),
}


def _usage() -> str:
    lines = [f"  {name:<6}  {summary}" for name, (_, summary) in _COMMANDS.items()]
    return "\n".join([f"usage: {_PROG} COMMAND ...", "", *lines, "", f"`{_PROG} COMMAND --help` lists its options."])
