"""Qwen, the first generation (Qwen-7B-Chat and its sizes), which transformers knows as remote code only.

Contexts beyond `seq_length` have two switches of their own: `use_dynamic_ntk` raises the base of the rope, and
`use_logn_attn` makes queries grow with the logarithm of their position. Its MLP has half of `intermediate_size`
columns, and the activation is on w2.
"""

from __future__ import annotations

from engine.layers.rope import Rope, SteppedRope
from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.spec import Family, LayerSpec, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("rotary_pct", 1.0)
    config.expect("scale_attn_weights", True)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim, inner = config.integer("kv_channels", 128), config.integer("intermediate_size")
    if num_heads * head_dim != hidden_size or head_dim % 2:
        raise ModelError(
            f"config.json: kv_channels ({head_dim}) must be even, and times num_attention_heads ({num_heads}) "
            f"hidden_size ({hidden_size})."
        )
    if inner % 2:
        raise ModelError(f"config.json: intermediate_size is {inner}; half of it is the MLP's, so it must be even.")
    longest = config.integer("max_position_embeddings", 8192)
    trained = config.integer("seq_length", longest)
    theta = config.number("rotary_emb_base", 10000.0)
    dynamic = config.flag("use_dynamic_ntk", True)
    rope = SteppedRope(theta=theta, trained_positions=trained) if dynamic else Rope(theta=theta)
    bias = not config.flag("no_bias", True)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=inner // 2,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        context_length=trained,
        max_context_length=max(trained, longest),
        layers=(LayerSpec(rope),) * config.integer("num_hidden_layers"),
        norm_eps=config.number("layer_norm_epsilon", 1e-6),
        tied_head=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
        attention_scale=head_dim**-0.5,
        log_queries_from=trained if config.flag("use_logn_attn", True) else 0,
        qkv_bias=True,
        output_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    spec=_spec,
    names=WeightNames(
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        gate_up=("mlp.w2", "mlp.w1"),
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
    ),
    ignored=(".rotary_emb.inv_freq", ".attn.masked_bias"),
)
