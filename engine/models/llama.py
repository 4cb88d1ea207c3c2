"""The Llama family: Llama 1 to 3, and all that share its shape."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.reading import read_spec
from engine.models.spec import Family, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    bias = config.flag("attention_bias", False)
    return replace(
        read_spec(config, max_positions=2048),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = Family(spec=_spec, names=WeightNames())
