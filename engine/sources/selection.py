"""Which of a model's files are needed: config, tokenizer, and its weights in one format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from engine.sources.remote import RemoteFile, SourceError

CONFIG = "config.json"

#: Taken when they are there.
_PLAIN = frozenset(
    (
        CONFIG,
        "generation_config.json",
        "quantize_config.json",
        "quant_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "chat_template.jinja",
        "chat_template.json",
    )
)
_TIKTOKEN = ".tiktoken"

#: The first that is there is taken, and no other: one file, else the shards that its index names.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"

#: Older tools named the one file after how it was quantized.
_SAFETENSORS = ".safetensors"
#: The same weights again under other names, and what changes weights of another model.
_NOT_WEIGHTS = ("consolidated", "adapter")

#: Size of the largest index that is read; that of a model of 1000 shards has 10 MB.
MAX_INDEX_BYTES = 64 * 2**20


def select(files: Mapping[str, RemoteFile], read: Callable[[RemoteFile], bytes]) -> tuple[RemoteFile, ...]:
    """The files to fetch, small ones first. `read` gives the content of one, here an index of shards.

    Raises SourceError when something needed is not among `files`, before anything is fetched.
    """
    if CONFIG not in files:
        raise SourceError(f"there is no {CONFIG} among its {len(files)} files, so this is no model that can be served.")
    plain = [file for name, file in files.items() if name in _PLAIN or name.endswith(_TIKTOKEN)]
    return tuple(sorted([*plain, *_weights(files, read)], key=lambda file: (file.size, file.name)))


def _weights(files: Mapping[str, RemoteFile], read: Callable[[RemoteFile], bytes]) -> list[RemoteFile]:
    for single in _WEIGHTS:
        if single in files:
            return [files[single]]
        if index := files.get(single + _INDEX):
            return [index, *_shards(index, files, read(index))]
        if single.endswith(_SAFETENSORS):
            others = [
                file
                for name, file in files.items()
                if name.endswith(_SAFETENSORS) and not name.startswith(_NOT_WEIGHTS)
            ]
            if len(others) == 1:
                return others
    raise SourceError(
        f"it has no weights in a form that is known: {', '.join(_WEIGHTS)}, or either in shards with an index. "
        f"It has {_some(files)}."
    )


def _shards(index: RemoteFile, files: Mapping[str, RemoteFile], content: bytes) -> list[RemoteFile]:
    try:
        weight_map = json.loads(content)["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"its {index.name} is not an index of shards: {error!r}.") from error
    for name in names:
        if PurePosixPath(name).name != name:
            raise SourceError(f"its {index.name} names {name!r}, which is not a file beside it.")
    missing = [name for name in names if name not in files]
    if missing or not names:
        raise SourceError(
            f"its {index.name} lists {len(names)} shards, of which {len(missing)} are not there: "
            f"{', '.join(missing[:5])}. Upload them, or choose another revision."
        )
    return [files[name] for name in names]


def _some(files: Mapping[str, RemoteFile]) -> str:
    names = sorted(files)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
