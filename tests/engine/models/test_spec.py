"""config.json as both generations of transformers write it."""

from __future__ import annotations

import pytest

from engine.layers.rope import LinearRope, LongRope, Rope, SteppedRope
from engine.loading.store import ModelError
from engine.models import family_of
from engine.models.config import ConfigFields
from engine.models.spec import LayerSpec, ModelSpec
from kernels import Activation

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
    assert (found.num_kv_heads, found.head_dim, found.context_length, found.max_context_length) == (4, 16, 2048, 2048)
    assert (found.norm_eps, found.layers, found.dtype) == (1e-6, (LayerSpec(Rope(theta=10000.0)),) * 2, None)
    assert (found.attention_scale, found.activation, found.embedding_scale) == (0.25, Activation.SILU, 1.0)
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
    assert spec(**fields).layers[0].rope == Rope(theta=5e5)


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
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no rope_scaling.low_freq_factor"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "the type 'mrope'; supported are default, dynamic"),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.type must be a string, not 3"),
        ({"rope_scaling": {"type": "linear"}}, "has no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor of rotary positions is 0.5; .* at least 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "rope_parameters.factor must be a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}; supported is null"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1]}},
            "short_factor must be a list of 8 positive",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must be an object or null"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, not inf"),
        ({"head_dim": 15}, "rotary positions turn 15 dimensions of a head; they need an even"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; supported are float32, bfloat16, float16"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\]; supported here: .*, LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None; supported here: .*, LlamaForCausalLM"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(**fields)


def windows(architecture: str, **fields: object) -> list[int]:
    values = {"architectures": [architecture], "num_hidden_layers": 4, "head_dim": 16} | fields
    return [layer.window for layer in spec(**values).layers]


def test_windows_of_mistral() -> None:
    assert windows("MistralForCausalLM") == [4096] * 4
    assert windows("MistralForCausalLM", sliding_window=16) == [16] * 4
    assert windows("MistralForCausalLM", sliding_window=None) == [0] * 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen_are_those_of_its_upper_layers_when_switched_on(architecture: str) -> None:
    size = {"sliding_window": 16, "max_window_layers": 3}
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert windows(architecture, **size) == [0] * 4
    assert windows(architecture, **size, use_sliding_window=True) == [0, 0, 0, 16]
    assert windows(architecture, **size | {"max_window_layers": 0}, use_sliding_window=True) == [16] * 4
    assert windows(architecture, **size, use_sliding_window=True, layer_types=types) == [16, 0, 0, 0]
    with pytest.raises(ModelError, match="use_sliding_window or sliding_window is not set"):
        windows(architecture, **size, layer_types=types)


def test_gemma2() -> None:
    found = spec(architectures=["Gemma2ForCausalLM"], head_dim=16, sliding_window=512, num_hidden_layers=3)
    whole, local = LayerSpec(Rope(theta=1e4)), LayerSpec(Rope(theta=1e4), 512)
    assert found.layers == (local, whole, local)
    assert (found.score_soft_cap, found.logit_soft_cap, found.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (found.tied_head, found.norms_from_one, found.activation) == (True, True, Activation.GELU_TANH)
    assert (found.embedding_scale, found.context_length) == (8.0, 8192)
    null = spec(architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (null.score_soft_cap, null.logit_soft_cap, null.head_dim) == (0.0, 0.0, 256)
    types = ["full_attention", "sliding_attention"]
    assert [layer.window for layer in spec(architectures=["Gemma2ForCausalLM"], layer_types=types).layers] == [0, 4096]


def qwen(**fields: object) -> ModelSpec:
    return spec(architectures=["QWenLMHeadModel"], kv_channels=16, **fields)


def test_qwen() -> None:
    found = qwen(seq_length=2048, max_position_embeddings=8192)
    assert found.layers == (LayerSpec(SteppedRope(theta=1e4, trained_positions=2048)),) * 2
    assert (found.context_length, found.max_context_length, found.log_queries_from) == (2048, 8192, 2048)
    assert (found.intermediate_size, found.num_kv_heads, found.norm_eps, found.tied_head) == (64, 4, 1e-6, False)
    assert (found.qkv_bias, found.output_bias, found.mlp_bias) == (True, False, False)
    other = qwen(use_dynamic_ntk=False, use_logn_attn=False, rotary_emb_base=5e5, no_bias=False)
    assert (other.layers[0].rope, other.log_queries_from) == (Rope(theta=5e5), 0)
    assert (other.output_bias, other.mlp_bias, other.context_length) == (True, True, 8192)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kv_channels": 8}, r"kv_channels \(8\) must be even, and times num_attention_heads \(4\) hidden_size \(64\)"),
        ({"intermediate_size": 127}, "intermediate_size is 127; half of it is the MLP's, so it must be even"),
        ({"rotary_pct": 0.5}, "rotary_pct is 0.5; supported is 1.0"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; supported is True"),
    ],
)
def test_refusals_of_qwen(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(architectures=["QWenLMHeadModel"], **{"kv_channels": 16} | fields)


def phi3(**fields: object) -> ModelSpec:
    return spec(architectures=["Phi3ForCausalLM"], **fields)


def test_phi3() -> None:
    found = phi3(sliding_window=2047)
    assert (found.norm_eps, found.tied_head, found.context_length) == (1e-5, False, 4096)
    assert found.layers == (LayerSpec(Rope(theta=1e4), 2047),) * 2
    assert [layer.window for layer in phi3(sliding_window=None).layers] == [0, 0]
    assert (phi3().rotary_dim, phi3(partial_rotary_factor=0.75).rotary_dim) == (16, 12)
    assert phi3(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}).rotary_dim == 8


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_of_phi3_in_its_spellings(kind: str) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    sizes = {"max_position_embeddings": 1024, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
    found = phi3(rope_scaling={"type": kind} | factors, **sizes)
    rope = found.layers[0].rope
    assert isinstance(rope, LongRope)
    assert (rope.trained_positions, rope.short_factor, rope.long_factor) == (64, (1.0,) * 6, (2.0,) * 6)
    assert rope.magnitude == pytest.approx((1 + 4 / 6) ** 0.5)
    assert (found.context_length, found.max_context_length) == (1024, 1024)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of heads of 16 dimensions is not 2 to 16"),
        ({"partial_rotary_factor": 0.45}, "rotary positions turn 7 dimensions of a head; they need an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        (
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.2}, "original_max_position_embeddings": 64},
            "rope_scaling.short_mscale is 1.2; supported is null",
        ),
    ],
)
def test_refusals_of_phi3(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        phi3(**fields)


def test_layers_of_gemma3() -> None:
    found = spec(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        head_dim=16,
        sliding_window=512,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    local, whole = LayerSpec(Rope(theta=1e4), 512), LayerSpec(LinearRope(theta=1e6, factor=8.0))
    assert found.layers == (local,) * 5 + (whole, local)
    assert (found.context_length, found.attention_scale, found.embedding_scale) == (131072, 1 / 16, 8.0)
    assert (found.tied_head, found.norms_from_one, found.activation) == (True, True, Activation.GELU_TANH)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported is null"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; supported is 'gelu_pytorch_tanh'"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must name full_attention or sliding_attention for each of 2",
        ),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
    ],
)
def test_refusals_of_gemma3(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(architectures=["Gemma3ForCausalLM"], **fields)
