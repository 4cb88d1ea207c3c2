"""config.json as both generations of transformers write it."""

from __future__ import annotations

import pytest

from engine.loading.store import ModelError
from engine.models import family_of
from engine.models.spec import ConfigFields, ModelSpec

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def spec(**fields: object) -> ModelSpec:
    values = {**BASE, **fields}
    return family_of(values["architectures"]).spec(ConfigFields(values))


def test_defaults_are_those_of_llama() -> None:
    found = spec()
    assert (found.num_kv_heads, found.head_dim, found.max_positions) == (4, 16, 2048)
    assert (found.norm_eps, found.rope_theta, found.dtype) == (1e-6, 10000.0, None)
    assert (found.tied_head, found.qkv_bias, found.output_bias, found.mlp_bias) == (False,) * 4


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0},
        {"rope_theta": 500000, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta(fields: dict[str, object]) -> None:
    assert spec(**fields).rope_theta == 5e5


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16", "dtype": None}, "float16"),
        ({"dtype": None}, None),
    ],
)
def test_dtype_first_and_null_is_absent(fields: dict[str, object], dtype: str | None) -> None:
    assert spec(**fields).dtype == dtype


def test_head_dim_and_biases() -> None:
    found = spec(head_dim=20, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (found.head_dim, found.num_kv_heads) == (20, 2)
    assert (found.qkv_bias, found.output_bias, found.mlp_bias, found.tied_head) == (True,) * 4


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, not True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, not nan"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, not 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported is 1.0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has the type 'llama3'"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_scaling has the type 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters has the type 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object or null"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; supported are float32, bfloat16, float16"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\]; supported here: LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None; supported here: LlamaForCausalLM"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(**fields)
