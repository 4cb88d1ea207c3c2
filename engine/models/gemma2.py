"""Gemma 2: norms on both sides of attention and MLP, GELU, soft caps of scores and logits, a window on every other
layer.
"""

from __future__ import annotations

from dataclasses import replace

from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.reading import FULL, SLIDING, layer_types, read_spec
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames
from kernels import Activation

_MAX_POSITIONS = 8192
_HEAD_DIM = 256


def as_gemma(spec: ModelSpec, config: ConfigFields) -> ModelSpec:
    """`spec` with what Gemma 2 and 3 share. Raises ModelError."""
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", False)
    return replace(
        spec,
        tied_head=config.flag("tie_word_embeddings", True),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        activation=Activation.GELU_TANH,
        embedding_scale=spec.hidden_size**0.5,
        norms_from_one=True,
    )


def read_window(config: ConfigFields, types: tuple[str, ...]) -> int:
    """The window of the layers that `types` says have one. Raises ModelError."""
    window = config.integer_or_none("sliding_window", 4096)
    if window is None and SLIDING in types:
        raise ModelError(f"config.json: sliding_window is null, and layers are of the type {SLIDING}.")
    return window or 0


def _spec(config: ConfigFields) -> ModelSpec:
    spec = as_gemma(read_spec(config, max_positions=_MAX_POSITIONS, head_dim=_HEAD_DIM), config)
    types = layer_types(config, [FULL if number % 2 else SLIDING for number in range(spec.num_layers)])
    window = read_window(config, types)
    return replace(
        spec,
        layers=tuple(
            LayerSpec(layer.rope, window if kind == SLIDING else 0)
            for layer, kind in zip(spec.layers, types, strict=True)
        ),
        score_soft_cap=config.number_or_none("attn_logit_softcapping", 50.0) or 0.0,
        logit_soft_cap=config.number_or_none("final_logit_softcapping", 30.0) or 0.0,
    )


NAMES = WeightNames(
    output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    down_norm="post_feedforward_layernorm",
)

FAMILY = Family(spec=_spec, names=NAMES)
