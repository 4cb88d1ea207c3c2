"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config import ConfigFields
from engine.models.reading import read_experts, read_spec
from engine.models.spec import ExpertNames, Family, LayerSpec, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    spec = read_spec(config, max_positions=131072, norm_eps=1e-5)
    window = config.integer("sliding_window") if config.has("sliding_window") else 0
    # It takes the softmax over all experts and divides by the sum over those chosen: the softmax over these.
    experts = read_experts(config, inner_size=spec.intermediate_size, renormalize=True)
    return replace(spec, layers=tuple(LayerSpec(layer.rope, window, experts) for layer in spec.layers))


FAMILY = Family(
    spec=_spec,
    names=WeightNames(
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        )
    ),
    other_names=WeightNames(),  # what transformers 5 has in memory, and stores on request
)
