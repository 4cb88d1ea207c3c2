"""What config.json says of Qwen3-MoE. The model itself is compared in `test_families`."""

from __future__ import annotations

import pytest

from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.qwen3_moe import FAMILY
from engine.models.spec import ExpertsSpec, ModelSpec

#: Qwen3-30B-A3B's own file, with five layers.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

EXPERTS = ExpertsSpec(count=128, top_k=8, inner_size=768, renormalize=True)


def spec(**fields: object) -> ModelSpec:
    return FAMILY.spec(ConfigFields(CONFIG | fields))


def sparse(**fields: object) -> list[bool]:
    """For each layer whether it has experts."""
    return [layer.experts is not None for layer in spec(**fields).layers]


def test_real_config() -> None:
    found = spec()
    assert [layer.experts for layer in found.layers] == [EXPERTS] * 5
    assert [layer.window for layer in found.layers] == [0] * 5
    assert (found.head_dim, found.num_kv_heads, found.qkv_bias, found.inner_sizes) == (128, 4, False, {768})
    assert spec(norm_topk_prob=None).layers[0].experts == ExpertsSpec(128, 8, 768, renormalize=False)


def test_which_layers_have_experts() -> None:
    assert sparse(decoder_sparse_step=2) == [False, True, False, True, False]
    assert sparse(mlp_only_layers=[0, 3, 17]) == [False, True, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1]) == [False, False, False, True, False]
    assert sparse(mlp_only_layers=None) == [True] * 5
    assert spec(decoder_sparse_step=2).inner_sizes == {768, 6144}


def test_count_as_transformers_5_writes_it() -> None:
    assert spec(num_experts=None, num_local_experts=16).layers[0].experts == ExpertsSpec(16, 8, 768, renormalize=True)


def test_a_window_is_every_layers() -> None:
    """As in transformers, where `max_window_layers` has no part in it."""
    size = {"sliding_window": 512, "max_window_layers": 3}
    assert [layer.window for layer in spec(**size).layers] == [0] * 5
    assert [layer.window for layer in spec(**size, use_sliding_window=True).layers] == [512] * 5


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_experts": None}, "has no num_local_experts"),
        ({"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ({"num_experts": 4}, r"num_experts_per_tok \(8\) must be at most num_experts \(4\)"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of integers, not 3"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers must be a list of integers, not \[True\]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(**fields)
