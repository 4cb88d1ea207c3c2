"""Gemma 3, text alone: norms on both sides of attention and MLP, GELU, local layers with a rope of their own."""

from __future__ import annotations

from dataclasses import replace

from engine.layers.rope import Rope
from engine.models.config import ConfigFields
from engine.models.gemma2 import NAMES, as_gemma, read_window
from engine.models.reading import FULL, SLIDING, layer_types, read_spec
from engine.models.rope import rope_of, rotary_dim
from engine.models.spec import Family, LayerSpec, ModelSpec

_MAX_POSITIONS = 131072
_HEAD_DIM = 256


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("attn_logit_softcapping", None)
    config.expect("final_logit_softcapping", None)
    # It has two ropes; `_layers` reads them.
    common = config.without("rope_parameters", "rope_scaling")
    spec = read_spec(common, max_positions=_MAX_POSITIONS, head_dim=_HEAD_DIM)
    return replace(as_gemma(spec, config), layers=_layers(config, spec))


def _layers(config: ConfigFields, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Every sixth layer sees all and has the global rope, the others a window and the local one."""
    pattern = config.integer("sliding_window_pattern", 6)
    default = [FULL if (number + 1) % pattern == 0 else SLIDING for number in range(spec.num_layers)]
    types = layer_types(config, default)
    window = read_window(config, types)
    kinds = {
        FULL: LayerSpec(_rope(config, FULL, config.number("rope_theta", 1e6), spec)),
        SLIDING: LayerSpec(_rope(config, SLIDING, config.number("rope_local_base_freq", 1e4), spec), window),
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


FAMILY = Family(spec=_spec, names=replace(NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"))
