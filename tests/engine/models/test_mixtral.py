"""What config.json says of Mixtral. The model itself is compared in `test_families`."""

from __future__ import annotations

import pytest

from engine.layers.rope import Rope
from engine.loading.store import ModelError
from engine.models.config import ConfigFields
from engine.models.mixtral import FAMILY
from engine.models.spec import ExpertsSpec, LayerSpec, ModelSpec

#: Mixtral 8x7B's own file, with two layers.
CONFIG: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}


def spec(**fields: object) -> ModelSpec:
    return FAMILY.spec(ConfigFields(CONFIG | fields))


def test_every_layer_has_experts() -> None:
    experts = ExpertsSpec(count=8, top_k=2, inner_size=14336, renormalize=True)
    assert spec().layers == (LayerSpec(Rope(theta=1e6), 0, experts),) * 2
    assert spec(sliding_window=4096).layers == (LayerSpec(Rope(theta=1e6), 4096, experts),) * 2
    assert spec().inner_sizes == {14336}
    assert spec(rms_norm_eps=None).norm_eps == 1e-5


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_local_experts": None}, "has no num_local_experts"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"num_local_experts": 0}, "num_local_experts must be a positive integer, not 0"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must be at most num_local_experts \(8\)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        spec(**fields)
