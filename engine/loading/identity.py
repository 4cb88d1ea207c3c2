"""The two names of what is served: `digest` (which model) and `numerics` (which bits)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import orjson

from engine.loading.formats import Checkpoint
from engine.loading.store import ModelFolder
from protocol import bundle

#: Raised whenever a change of ours may change a bit of any result.
NUMERICS = 1

#: Hashed as a whole, when present. The last two describe quantization.
_CONFIG_FILES = ("config.json", "generation_config.json", "quantize_config.json", "quant_config.json")

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024


def model_digest(folder: ModelFolder, tokenizer: bytes, checkpoint: Checkpoint | None) -> str:
    """sha256 (hex) over configs, tokenizer bundle and, for each weight file, its name, size, header
    and 64 samples of 64 KiB, so that a model of any size takes some milliseconds. None: dummy weights.
    """
    digest = hashlib.sha256()
    for name in _CONFIG_FILES:
        if folder.has(name):
            _update(digest, name.encode(), folder.read_bytes(name))
    _update(digest, b"bundle", bundle.sha256(tokenizer).encode())
    if checkpoint is None:
        _update(digest, b"dummy weights")
        return digest.hexdigest()
    for file in checkpoint.files:
        size = file.stat().st_size
        _update(digest, file.name.encode(), size.to_bytes(8, "little"), checkpoint.header(file))
        with file.open("rb") as stream:
            for sample in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def numerics_hash(facts: Mapping[str, str | int | bool]) -> str:
    """sha256 (hex) over all that decides the bits of a result, `NUMERICS` included."""
    return hashlib.sha256(orjson.dumps({**facts, "NUMERICS": NUMERICS}, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _update(digest: hashlib._Hash, *parts: bytes) -> None:
    """Each part after its length, so that parts cannot run together."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
