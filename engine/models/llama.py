"""The Llama family: Llama 1 to 3 with unscaled rotary positions, and all that share its shape."""

from __future__ import annotations

from engine.loading.store import ModelError
from engine.models.spec import ConfigFields, Family, ModelSpec, WeightNames


def _spec(config: ConfigFields) -> ModelSpec:
    config.expect("hidden_act", "silu")
    config.expect("partial_rotary_factor", 1.0)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        max_positions=config.integer("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.plain_rope_theta(),
        tied_head=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        dtype=config.dtype(),
    )


FAMILY = Family(
    spec=_spec,
    names=WeightNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        final_norm="model.norm",
        head="lm_head",
    ),
    ignored=(".rotary_emb.inv_freq",),
)
