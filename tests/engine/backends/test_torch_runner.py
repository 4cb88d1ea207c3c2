"""What the backend tells of a model, and how it refuses one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.torch_runner import TorchRunner
from engine.loading.store import ModelError
from engine.plan import ModelInfo
from protocol import bundle
from protocol.sampling import SamplingParams
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import CONTEXT_LENGTH, EOS_ID, VOCAB_SIZE, prompt
from tests.engine.torch_runners import Settings, driver, load

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def settings(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> Settings:
    """Settings for a copy of the tied model, to be changed at will."""
    shutil.copytree(tiny_models / "llama_tied", tmp_path / "model")
    return Settings(str(tmp_path / "model"), cache_dir=kernel_cache)


def edit(settings: Settings, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = Path(settings.model or "") / name
    values = json.loads(path.read_text()) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values))


def info(settings: Settings) -> ModelInfo:
    return load(settings)[1]


def test_model_info(settings: Settings) -> None:
    found = info(settings)
    assert (found.vocab_size, found.context_length, found.block_size) == (VOCAB_SIZE, CONTEXT_LENGTH, 16)
    assert found.eos_ids == (EOS_ID,)
    assert found.generation_defaults == {}
    # 3 layers, keys and values, 2 heads of 16, 16 positions, float32
    assert found.num_blocks == 32 * 2**20 // (3 * 2 * 2 * 16 * 16 * 4)
    assert set(bundle.unpack(found.bundle)) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_generation_config_is_used(settings: Settings) -> None:
    edit(settings, "generation_config.json", lambda v: v.update(eos_token_id=[2, 9], temperature=1.0, top_k=64))
    found = info(settings)
    assert found.eos_ids == (2, 9)
    assert found.generation_defaults == {"temperature": 1.0, "top_k": 64}


def greedy_ids(settings: Settings) -> list[int]:
    runner, found = load(settings)
    sampling = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0)
    return driver(runner, found).run_alone(Sequence(prompt(5), sampling, ends=(EOS_ID,))).generated


def test_old_config_keys_are_the_same_model(settings: Settings, golden: dict[str, dict[str, list[list[int]]]]) -> None:
    def age(values: dict[str, object]) -> None:
        del values["rope_parameters"], values["head_dim"], values["dtype"]
        values.update(rope_theta=10000.0, rope_scaling=None, torch_dtype="float32")

    edit(settings, "config.json", age)
    assert greedy_ids(settings) == golden["llama_tied"]["ids"][5]


@pytest.mark.parametrize(("asked", "config"), [("auto", "bfloat16"), ("bfloat16", "float32")])
def test_dtype_auto_is_the_configs(settings: Settings, asked: str, config: str) -> None:
    edit(settings, "config.json", lambda v: v.update(dtype=config))
    small = info(replace(settings, dtype=asked))
    large = info(replace(settings, dtype="float32"))
    assert small.num_blocks // 2 == large.num_blocks
    assert small.numerics != large.numerics
    assert small.digest == large.digest


def test_dtype_of_a_silent_config_is_that_of_the_weights(settings: Settings) -> None:
    weights = Path(settings.model or "") / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights)
    edit(settings, "config.json", lambda v: v.pop("dtype"))
    assert info(settings).num_blocks == info(replace(settings, dtype="bfloat16")).num_blocks


def test_numerics_do_not_depend_on_sizes_and_threads(settings: Settings) -> None:
    other = replace(settings, threads=2, max_num_seqs=3, block_size=32, max_model_len=100, kv_cache_memory_bytes=2**20)
    assert info(other).numerics == info(settings).numerics


def test_max_model_len(settings: Settings) -> None:
    assert info(replace(settings, max_model_len=100)).context_length == 100
    with pytest.raises(ModelError, match=f"--max-model-len 641 is more than the model's .* {CONTEXT_LENGTH}"):
        info(replace(settings, max_model_len=641))


def test_context_without_room(settings: Settings) -> None:
    assert info(replace(settings, kv_cache_memory_bytes=40 * 12288)).num_blocks == 40
    with pytest.raises(ModelError, match=r"--max-model-len 640 needs 40 KV blocks .* holds 39"):
        info(replace(settings, kv_cache_memory_bytes=40 * 12288 - 1))


def test_default_pool_takes_at_most_2_gib(settings: Settings) -> None:
    found = info(replace(settings, kv_cache_memory_bytes=None))
    assert CONTEXT_LENGTH / 16 <= found.num_blocks <= 2 * 2**30 / 12288


def test_a_stored_copy_of_a_tied_head_is_ignored(
    settings: Settings, golden: dict[str, dict[str, list[list[int]]]]
) -> None:
    weights = Path(settings.model or "") / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * -1}, weights)
    assert greedy_ids(settings) == golden["llama_tied"]["ids"][5]


def test_old_rotary_buffers_are_ignored(settings: Settings) -> None:
    weights = Path(settings.model or "") / "model.safetensors"
    tensors = load_file(weights)
    buffer = tensors["model.norm.weight"].clone()
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": buffer}, weights)
    assert info(settings).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_hidden_layers", 2, "holds model.layers.2.input_layernorm.weight and 8 more"),
        ("num_hidden_layers", 4, "hold no model.layers.3.input_layernorm.weight"),
        ("vocab_size", 121, r"model.embed_tokens.weight has the shape \[120, 64\]; config.json calls for \[121, 64\]"),
        ("intermediate_size", 111, r"mlp.gate_proj.weight has the shape \[112, 64\]"),
        ("tie_word_embeddings", False, "hold no lm_head.weight"),
        ("attention_bias", True, "hold no model.layers.0.self_attn.q_proj.bias"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantized \\(gptq\\), but none is"),
        ("quantization_config", {"quant_method": "quip"}, "method is 'quip'; supported are awq"),
        ("quantization_config", {"bits": 4}, "method is 'unnamed'"),
        ("architectures", ["OPTForCausalLM"], "OPTForCausalLM.* supported here: .*LlamaForCausalLM"),
    ],
)
def test_config_and_weights_that_disagree(settings: Settings, field: str, value: object, text: str) -> None:
    edit(settings, "config.json", lambda v: v.update({field: value}))
    with pytest.raises(ModelError, match=text):
        info(settings)


def test_no_model_is_named() -> None:
    with pytest.raises(ModelError, match="no model is named"):
        info(Settings(None))


def test_progress_ends_at_the_whole(settings: Settings) -> None:
    calls: list[tuple[str, int, int]] = []
    TorchRunner(settings).load(lambda phase, done, total: calls.append((phase, done, total)))
    assert calls[0] == ("preparing kernels", 0, 0)
    phase, done, total = calls[-1]
    assert phase == "loading weights"
    assert done == total > 0


def test_dummy_weights_need_a_config_and_a_tokenizer_alone(settings: Settings) -> None:
    for file in Path(settings.model or "").glob("*.safetensors"):
        file.unlink()
    dummy = replace(settings, load_format="dummy")
    runner, info = load(dummy)
    assert info.digest == load(dummy)[1].digest
    ids = driver(runner, info).run_alone(Sequence(prompt(3), SamplingParams(max_tokens=8, temperature=0.0))).generated
    assert len(ids) == 8
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors"):
        load(settings)


def test_bfloat16_before_ampere(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a kernel is built, whether it was asked for or is the model's own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    text = r"bfloat16 needs a GPU of compute capability 8\.0 or more; Tesla T4 has 7\.5\. Use --dtype float16\."
    with pytest.raises(ModelError, match=text):
        load(replace(settings, device="cuda", dtype="bfloat16"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(settings: Settings) -> None:
    with pytest.raises(ModelError, match="--device cuda: torch sees no GPU here"):
        load(replace(settings, device="cuda"))
    assert load(replace(settings, device="auto"))[0].max_in_flight == 1
