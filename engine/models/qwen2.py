"""Qwen2 and Qwen2.5: Llama's shape with biases on queries, keys and values, and windows on the upper layers."""

from __future__ import annotations

from dataclasses import replace

from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.reading import FULL, SLIDING, layer_types, read_spec
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames


def with_windows(spec: ModelSpec, config: ConfigFields) -> ModelSpec:
    """`spec` with the windows of Qwen's fields, which are off unless `use_sliding_window` is true."""
    window = config.integer_or_none("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    first = spec.num_layers if window is None else config.integer("max_window_layers", 28, least=0)
    types = layer_types(config, [SLIDING if number >= first else FULL for number in range(spec.num_layers)])
    if window is None and SLIDING in types:
        raise ModelError(
            f"config.json: layer_types names {SLIDING}, and use_sliding_window or sliding_window is not set."
        )
    windows = (window if kind == SLIDING else None for kind in types)
    return replace(
        spec, layers=tuple(LayerSpec(layer.rope, size or 0) for layer, size in zip(spec.layers, windows, strict=True))
    )


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    return replace(with_windows(read_spec(config, max_positions=32768), config), qkv_bias=True)


FAMILY = Family(spec=_spec, names=WeightNames())
