"""Phi-3, Phi-3.5 and Phi-4 (mini): Llama's shape with one matrix for queries, keys and values and one for gate and up,
rotary positions that may turn a part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.reading import read_spec
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    window = config.integer("sliding_window", 0, least=0)
    spec = read_spec(config, max_positions=4096, norm_eps=1e-5, partial=True)
    return replace(spec, layers=tuple(LayerSpec(layer.rope, window) for layer in spec.layers))


FAMILY = Family(
    spec=_spec,
    names=WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
