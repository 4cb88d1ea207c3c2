"""What families read alike from config.json."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.rope import read_rope
from engine.models.spec import ExpertsSpec, LayerSpec, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def read_spec(
    config: ConfigFields,
    *,
    max_positions: int,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    partial: bool = False,
) -> ModelSpec:
    """The fields that have one meaning everywhere: one rope, no windows, no biases. A family replaces what is
    otherwise. `max_positions`, `head_dim` and `norm_eps` are the family's defaults, `partial` is as in
    `rotary_dim`. Raises ModelError.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    head_dim = config.integer("head_dim", head_dim or hidden_size // num_heads)
    max_positions = config.integer("max_position_embeddings", max_positions)
    rope = read_rope(config, head_dim=head_dim, max_positions=max_positions, partial=partial)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rope.rotary_dim,
        context_length=rope.context_length,
        max_context_length=rope.max_context_length,
        layers=(LayerSpec(rope.rope),) * config.integer("num_hidden_layers"),
        norm_eps=config.number("rms_norm_eps", norm_eps),
        tied_head=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
        attention_scale=head_dim**-0.5,
    )


def read_experts(config: ConfigFields, *, inner_size: int, renormalize: bool) -> ExpertsSpec:
    """How many experts there are, and how many answer a token. Raises ModelError."""
    name = "num_experts" if config.has("num_experts") else "num_local_experts"
    count, top_k = config.integer(name), config.integer("num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok ({top_k}) must be at most {name} ({count}).")
    return ExpertsSpec(count, top_k, inner_size, renormalize)


def layer_types(config: ConfigFields, default: Sequence[str]) -> tuple[str, ...]:
    """FULL or SLIDING for each layer: `layer_types` of the config, or `default`, which has the right length."""
    types = config.words("layer_types")
    if types is None:
        return tuple(default)
    if len(types) != len(default) or not set(types) <= {FULL, SLIDING}:
        raise ModelError(
            f"config.json: layer_types must name {FULL} or {SLIDING} for each of {len(default)} layers, "
            f"not {list(types)!r}."
        )
    return types
