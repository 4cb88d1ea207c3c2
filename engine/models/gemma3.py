"""Gemma 3, text alone: norms on both sides of attention and MLP, GELU, local layers with a rope of their own."""

from __future__ import annotations

from dataclasses import replace

from engine.layers.rope import Rope
from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.reading import FULL, SLIDING, layer_types, read_spec
from engine.models.rope import rope_of, rotary_dim
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames
from kernels import Activation

_MAX_POSITIONS = 131072
_HEAD_DIM = 256


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attn_logit_softcapping", None)
    config.expect("final_logit_softcapping", None)
    config.expect("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", False)
    # It has two ropes; `_layers` reads them.
    common = config.without("rope_parameters", "rope_scaling")
    spec = read_spec(common, max_positions=_MAX_POSITIONS, head_dim=_HEAD_DIM)
    return replace(
        spec,
        layers=_layers(config, spec),
        tied_head=config.flag("tie_word_embeddings", True),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        activation=Activation.GELU_TANH,
        embedding_scale=spec.hidden_size**0.5,
        norms_from_one=True,
    )


def _layers(config: ConfigFields, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Every sixth layer sees all and has the global rope, the others a window and the local one."""
    pattern = config.integer("sliding_window_pattern", 6)
    default = [FULL if (number + 1) % pattern == 0 else SLIDING for number in range(spec.num_layers)]
    types = layer_types(config, default)
    window = config.integer_or_none("sliding_window", 4096)
    if window is None and SLIDING in types:
        raise ModelError(f"config.json: sliding_window is null, and layers are of the type {SLIDING}.")
    kinds = {
        FULL: LayerSpec(_rope(config, FULL, config.number("rope_theta", 1e6), spec)),
        SLIDING: LayerSpec(_rope(config, SLIDING, config.number("rope_local_base_freq", 1e4), spec), window or 0),
    }
    return tuple(kinds[kind] for kind in types)


def _rope(config: ConfigFields, kind: str, theta: float, spec: ModelSpec) -> Rope:
    """The rope of layers of `kind`: newer configs nest its parameters, in older ones scaling is the global layers'."""
    parameters = config.inner("rope_parameters").inner(kind)
    if kind == FULL and config.has("rope_scaling"):
        parameters = config.inner("rope_scaling")
    return rope_of(
        parameters,
        config,
        theta=parameters.number("rope_theta", theta),
        rotary_dim=rotary_dim(parameters, config, spec.head_dim),
        max_positions=spec.max_context_length,
    )


FAMILY = Family(
    spec=_spec,
    names=WeightNames(
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        down_norm="post_feedforward_layernorm",
    ),
)
