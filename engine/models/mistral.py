"""Mistral: Llama's shape, every layer with the same window, or none."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.reading import read_spec
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    window = config.integer_or_none("sliding_window", 4096) or 0
    spec = read_spec(config, max_positions=131072)
    return replace(spec, layers=tuple(LayerSpec(layer.rope, window) for layer in spec.layers))


FAMILY = Family(spec=_spec, names=WeightNames())
