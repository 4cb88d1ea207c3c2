"""Rotary positions out of config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.layers.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from engine.loading.store import ModelError
from engine.models.config import ConfigFields

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")

#: What transformers nests parameters under when layers differ.
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeChoice:
    """A model's rope, how many dimensions of a head it turns, how long the context is unless asked otherwise, and how
    long it may be.
    """

    rope: Rope
    rotary_dim: int
    context_length: int
    max_context_length: int


def read_rope(config: ConfigFields, *, head_dim: int, max_positions: int, partial: bool = False) -> RopeChoice:
    """The one rope of a model whose `max_position_embeddings` is `max_positions`. `partial` is as in `rotary_dim`.
    Raises ModelError.

    As in vLLM, scaling that names the factor by which the trained context grows makes the context that long.
    """
    # transformers lets a rope_scaling that is not empty win.
    parameters = config.inner("rope_scaling")
    if parameters.text("rope_type", "type", default="default") == "default":
        parameters = config.inner("rope_parameters")
    for name in _LAYER_TYPES:
        parameters.expect(name, None)
    theta = parameters.number("rope_theta", config.number("rope_theta", 10000.0))
    turned = rotary_dim(parameters, config, head_dim, partial=partial)
    rope = rope_of(parameters, config, theta=theta, rotary_dim=turned, max_positions=max_positions)
    match rope:
        case LinearRope(factor=factor):
            longest = int(factor * max_positions)
        case YarnRope(factor=factor, trained_positions=trained):
            longest = int(factor * trained)
        case DynamicRope(factor=factor):
            return RopeChoice(rope, turned, max_positions, max(max_positions, int(factor * max_positions)))
        case _:
            longest = max_positions
    return RopeChoice(rope, turned, longest, longest)


def rotary_dim(parameters: ConfigFields, config: ConfigFields, head_dim: int, *, partial: bool = False) -> int:
    """How many dimensions of a head turn: all, or in families that are `partial` the share that the config names.

    Raises ModelError.
    """
    name = "partial_rotary_factor"
    size = head_dim
    if partial:
        factor = parameters.number(name, config.number(name, 1.0))
        size = int(head_dim * factor)
        if not 2 <= size <= head_dim:
            raise ModelError(f"config.json: {name} {factor} of heads of {head_dim} dimensions is not 2 to {head_dim}.")
    else:
        config.expect(name, 1.0)
        parameters.expect(name, 1.0)
    if size % 2:
        raise ModelError(f"config.json: rotary positions turn {size} dimensions of a head; they need an even number.")
    return size


def rope_of(
    parameters: ConfigFields, config: ConfigFields, *, theta: float, rotary_dim: int, max_positions: int
) -> Rope:
    """The rope that `parameters` describe. Raises ModelError for an unknown kind or a field out of range."""
    kind = parameters.text("rope_type", "type", default="default")
    trained = config.integer(
        "original_max_position_embeddings", parameters.integer("original_max_position_embeddings", max_positions)
    )
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return LinearRope(theta=theta, factor=_factor(parameters))
        case "dynamic":
            if rotary_dim == 2:
                raise ModelError("config.json: dynamic rotary positions need more than 2 dimensions of a head.")
            return DynamicRope(theta=theta, factor=_factor(parameters), trained_positions=max_positions)
        case "llama3":
            return _llama3(parameters, theta, trained)
        case "yarn":
            return _yarn(parameters, theta, trained, max_positions)
        case "longrope" | "su":  # the name in Phi-3's first configs
            return _long(parameters, theta, trained, max_positions, rotary_dim)
    raise ModelError(f"config.json: rotary positions have the type {kind!r}; supported are {', '.join(KINDS)}.")


def _factor(parameters: ConfigFields, default: float | None = None) -> float:
    factor = parameters.number("factor", default)
    if factor < 1:
        raise ModelError(f"config.json: the factor of rotary positions is {factor}; it must be at least 1.")
    return factor


def _llama3(parameters: ConfigFields, theta: float, trained: int) -> Llama3Rope:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if not low < high:
        raise ModelError(f"config.json: low_freq_factor ({low}) must be less than high_freq_factor ({high}).")
    return Llama3Rope(
        theta=theta,
        factor=_factor(parameters),
        low_freq_factor=low,
        high_freq_factor=high,
        trained_positions=trained,
    )


def _yarn(parameters: ConfigFields, theta: float, trained: int, max_positions: int) -> YarnRope:
    factor = _factor(parameters, max_positions / trained)
    if theta <= 1.0:
        raise ModelError(f"config.json: rope_theta is {theta}; yarn needs one above 1.")
    if parameters.has("attention_factor"):
        magnitude = parameters.number("attention_factor")
    elif parameters.has("mscale") and parameters.has("mscale_all_dim"):
        magnitude = _mscale(factor, parameters.number("mscale")) / _mscale(factor, parameters.number("mscale_all_dim"))
    else:
        magnitude = _mscale(factor, 1.0)
    return YarnRope(
        theta=theta,
        magnitude=magnitude,
        factor=factor,
        trained_positions=trained,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _long(parameters: ConfigFields, theta: float, trained: int, max_positions: int, rotary_dim: int) -> LongRope:
    if trained == 1:
        raise ModelError("config.json: original_max_position_embeddings is 1; longrope needs more.")
    # Phi-3-small and Phi-3.5-MoE scale short and long tables each by a number of their own.
    parameters.expect("short_mscale", None)
    parameters.expect("long_mscale", None)
    factor = parameters.number("factor", max_positions / trained)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return LongRope(
        theta=theta,
        magnitude=parameters.number("attention_factor", magnitude),
        short_factor=parameters.numbers("short_factor", rotary_dim // 2),
        long_factor=parameters.numbers("long_factor", rotary_dim // 2),
        trained_positions=trained,
    )
