"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.reading import read_experts, read_spec
from engine.models.spec import ExpertsSpec, Family, LayerSpec, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    bias = config.flag("attention_bias", False)
    spec = read_spec(config, max_positions=32768)
    # Unlike in Qwen3 a window is every layer's.
    window = config.integer_or_none("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    layers = (
        LayerSpec(layer.rope, window or 0, experts)
        for layer, experts in zip(spec.layers, _experts(config, spec.num_layers), strict=True)
    )
    return replace(spec, layers=tuple(layers), qkv_bias=bias, output_bias=bias)


def _experts(config: ConfigFields, num_layers: int) -> list[ExpertsSpec | None]:
    """Experts in every `decoder_sparse_step`-th layer, but for those that are to have a plain MLP."""
    renormalize = config.flag("norm_topk_prob", False)
    experts = read_experts(config, inner_size=config.integer("moe_intermediate_size"), renormalize=renormalize)
    step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return [None if number in plain or (number + 1) % step else experts for number in range(num_layers)]


FAMILY = Family(spec=_spec, names=WeightNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"))
