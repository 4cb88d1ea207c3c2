"""The scales that a checkpoint has for keys and values in FP8."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import kernels
from engine.loading.formats import Checkpoint
from engine.loading.store import ModelError

log = logging.getLogger("engine")

_TYPES = ("F32", "BF16", "F16")


def read_kv_scales(
    checkpoint: Checkpoint | None, layers: Sequence[str], names: Sequence[str]
) -> tuple[kernels.KVScales, ...]:
    """One for each layer. `layers` are the prefixes of their tensors, `names` the projections to queries, keys
    and values, or the one that holds them all. What a checkpoint lacks is 1. Raises ModelError.
    """
    found = [
        [None if checkpoint is None else _read(checkpoint, _places(layer, names, part)) for part in ("k", "v")]
        for layer in layers
    ]
    lacking = sum(scale is None for pair in found for scale in pair)
    if lacking:
        log.warning(
            "Using KV cache scales of 1.0 for FP8 in %d of %d places, as the model has none there: answers may be "
            "worse. Calibrate with llmcompressor's kv_cache_scheme, or leave --kv-cache-dtype out.",
            *(lacking, 2 * len(layers)),
        )
    return tuple(kernels.KVScales(*(1.0 if scale is None else scale for scale in pair)) for pair in found)


def _places(layer: str, names: Sequence[str], part: str) -> Iterator[str]:
    """Where a scale may stand: llmcompressor's place, then those of AutoFP8, ModelOpt, and one for both of old."""
    yield f"{layer}{names[0].rpartition('.')[0]}.{part}_scale"
    if len(names) > 1:
        projection = f"{layer}{names[1 if part == 'k' else 2]}"
        yield f"{projection}.output_scale"
        yield f"{projection}.{part}_scale"
    yield f"{layer}{names[0].rpartition('.')[0]}.kv_scale"


def _read(checkpoint: Checkpoint, places: Iterator[str]) -> float | None:
    for name in places:
        entry = checkpoint.entries.get(name)
        if entry is None:
            continue
        if entry.dtype not in _TYPES or math.prod(entry.shape) != 1:
            raise ModelError(
                f"{entry.file.name}: {name} is {entry.dtype} {list(entry.shape)}; a scale of the KV cache is one "
                f"number of {', '.join(_TYPES)}. Use --kv-cache-dtype bfloat16, which needs none."
            )
        scale = float(checkpoint.read(name).float().reshape(()))
        if not (math.isfinite(scale) and scale > 0):
            raise ModelError(f"{entry.file.name}: {name} is {scale}; it must be positive and finite.")
        return scale
    return None
