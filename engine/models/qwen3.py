"""Qwen3 (dense): Qwen2 with norms on every query and key head in place of biases."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.qwen2 import with_windows
from engine.models.reading import read_spec
from engine.models.spec import Family, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    bias = config.flag("attention_bias", False)
    spec = with_windows(read_spec(config, max_positions=32768, head_dim=128), config)
    return replace(spec, qkv_bias=bias, output_bias=bias)


FAMILY = Family(spec=_spec, names=WeightNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"))
