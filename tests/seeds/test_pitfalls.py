"""Each pitfall and each piece of advice of the texts: what is good works, what is bad is refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.report import MemoryPlan, Report
from engine.preflight.wanted import Wanted
from protocol.config import SettingsError
from tests.engine.preflight.folders import Tensors, tensors_of, write_model
from tests.seeds.models import CONFIG, QUANT_CONFIG, QUANTIZE_CONFIG, Weights, pack_gptq, random_weights, write_folder
from tests.seeds.serving import HERE, SHORT, served

pytestmark = pytest.mark.timeout(300)

GB = 10**9
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 2**30, 8, (8, 0))
V100 = Device("cuda", "Tesla V100-SXM2-32GB", 32 * 2**30, 1, (7, 0))
RTX_3090 = Device("cuda", "NVIDIA GeForce RTX 3090", 24 * 2**30, 1, (8, 6))

_LLAMA = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "eos_token_id": 2}
LLAMA_2_70B: dict[str, object] = _LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
LLAMA_2_7B: dict[str, object] = _LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
LLAMA_3_8B: dict[str, object] = _LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def wanted(device: Device, *words: str, memory: int | None = None) -> Wanted:
    config = EngineConfig.load(list(words), {}, prog="sluicegate check")
    return Wanted.by(config, device if memory is None else replace(device, memory=memory))


def looked_at(folder: Path, device: Device, *words: str) -> Report:
    return check(folder, wanted(device, *words))


def plan_of(report: Report) -> MemoryPlan:
    assert report.ok, report.error_text()
    assert report.memory is not None
    return report.memory


def problems(folder: Path, device: Device, *words: str) -> list[str]:
    return [str(problem) for problem in looked_at(folder, device, *words).problems]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2 70B, headers alone."""
    return write_model(tmp_path_factory.mktemp("large") / "llama-70b-hf", LLAMA_2_70B, shards=15)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2 7B, headers alone."""
    return write_model(tmp_path_factory.mktemp("small") / "llama-7b-hf", LLAMA_2_7B)


# --- dtype ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "flags", "dtype"),
    [
        ({"torch_dtype": "float16"}, (), "float16"),
        ({"torch_dtype": "bfloat16"}, (), "bfloat16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, (), "bfloat16"),
        ({"torch_dtype": "float16"}, ("--dtype=bfloat16",), "bfloat16"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=float16",), "float16"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=half",), "float16"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=float32",), "float32"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=float",), "float32"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=auto",), "bfloat16"),
    ],
)
def test_auto_is_the_configs_and_the_others_are_as_named(
    tmp_path: Path, config: Mapping[str, object], flags: tuple[str, ...], dtype: str
) -> None:
    folder = write_model(tmp_path / "m", LLAMA_2_7B | config, tensors_of(LLAMA_2_7B, "F16"))
    report = looked_at(folder, A100, *flags)
    assert {fact.about: fact.text for fact in report.facts}["dtype"] == dtype


def test_half_is_half_the_memory_of_float32(small: Path) -> None:
    half, whole, brain = (
        plan_of(looked_at(small, A100, f"--dtype={name}")) for name in ("half", "float32", "bfloat16")
    )
    assert whole.weights == 2 * half.weights == 2 * brain.weights
    assert half.weights / GB == pytest.approx(2 * 6.74, abs=0.01)  # 6.74 B parameters
    assert whole.kv_per_token == 2 * half.kv_per_token


def test_bfloat16_before_ampere_is_refused_with_the_flag_to_use(small: Path) -> None:
    assert problems(small, V100, "--dtype=bfloat16") == [
        "bfloat16 needs a GPU of compute capability 8.0 or more; Tesla V100-SXM2-32GB has 7.0. Use --dtype float16."
    ]
    assert problems(small, V100, "--dtype=float16") == []


# --- tensor parallel -----------------------------------------------------------------------------


def test_a_70b_model_is_planned_for_1_2_4_and_8_gpus_and_not_for_3(large: Path) -> None:
    on_four = plan_of(looked_at(large, A100, "--tensor-parallel-size=4", "--gpu-memory-utilization=0.92"))
    assert on_four.weights / GB == pytest.approx(2 * 68.98 / 4, abs=0.01)
    assert on_four.max_sequences is not None
    assert on_four.max_sequences > 60
    for size in (2, 8):
        assert problems(large, A100, f"--tensor-parallel-size={size}") == []
    (too_large,) = problems(large, A100, "--tensor-parallel-size=1")
    assert too_large.startswith("Weights take 128.48 GiB and a step ")
    assert too_large.endswith(
        "of each GPU's 80.00 GiB, of which --gpu-memory-utilization 0.92 may be used: nothing is left for KV. "
        "Take more GPUs (--tensor-parallel-size), a quantized model, or lower --max-num-batched-tokens."
    )
    assert problems(large, A100, "--tensor-parallel-size=3")[0] == (
        "Total number of attention heads (64) must be divisible by tensor parallel size (3). Choose 1, 2, 4, 8 or 16."
    )


def test_32_heads_on_3_gpus_in_vllms_words(small: Path) -> None:
    assert (
        "Total number of attention heads (32) must be divisible by tensor parallel size (3)."
        in (problems(small, A100, "--tensor-parallel-size=3")[0])
    )


# --- quantization --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "method"),
    [("models/llama-2-7b-gptq", "quantize_config.json", "gptq"), ("llama-3-8b-awq", "quant_config.json", "awq")],
)
def test_the_file_that_describes_the_quantization_is_missing(
    machine: Path, tmp_path: Path, name: str, file: str, method: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for part in (machine / name).iterdir():
        if part.name != file:
            (folder / part.name).symlink_to(part)
    for flags in ((), (f"--quantization={method}",)):
        with pytest.raises(ModelError) as caught:
            served([str(folder), *SHORT, *flags])
        assert "neither quantize_config.json" in str(caught.value)
        assert "quant_config.json" in str(caught.value)
        assert "Copy the file that the quantizing tool wrote into the folder" in str(caught.value)


def test_a_flag_that_contradicts_the_model_is_refused_and_none_is_needed(machine: Path, kernel_cache: Path) -> None:
    folder = machine / "models/llama-2-7b-gptq"
    with pytest.raises(ModelError) as caught:
        served([str(folder), *SHORT, "--quantization=awq"])
    assert str(caught.value) == (
        f"{folder}: --quantization awq contradicts the model: quantize_config.json says gptq. "
        "Leave --quantization out; the format is found by itself."
    )
    cache = f"--cache-dir={kernel_cache}"
    confirmed, _ = served([str(folder), *SHORT, cache, "--quantization=gptq"])
    assert served([str(folder), *SHORT, cache])[0] == confirmed


def test_groups_of_another_size_than_described(tmp_path: Path, gptq_weights: Weights) -> None:
    folder = write_folder(tmp_path / "m", gptq_weights.stored)
    (folder / "quantize_config.json").write_text(json.dumps(QUANTIZE_CONFIG | {"group_size": 64}))
    with pytest.raises(ModelError) as caught:
        served([str(folder), *SHORT])
    assert str(caught.value) == (
        f"{folder}: quantize_config.json says group_size 64, with which 128 columns have 2 scales; model.safetensors: "
        "model.layers.0.self_attn.q_proj.scales has 1, one for 128 columns. Set group_size to 128, or take description "
        "and weights from one source."
    )


@pytest.mark.parametrize(("bits", "group_size"), [(3, 128), (4, 32), (4, -1)])
def test_int3_and_other_groups_are_the_model_of_their_weights(
    tmp_path: Path, kernel_cache: Path, bits: int, group_size: int
) -> None:
    weights = random_weights(pack=pack_gptq(bits, group_size))
    folder = write_folder(tmp_path / "m", weights.stored)
    described = QUANTIZE_CONFIG | {"bits": bits, "group_size": group_size}
    (folder / "quantize_config.json").write_text(json.dumps(described))
    plain = write_folder(tmp_path / "plain", weights.plain)
    flags = [*SHORT, f"--cache-dir={kernel_cache}"]
    assert served([str(folder), *flags])[0] == served([str(plain), *flags])[0]


def test_awq_of_3_bits_does_not_exist(tmp_path: Path, awq_weights: Weights) -> None:
    folder = write_folder(tmp_path / "m", awq_weights.stored)
    (folder / "quant_config.json").write_text(json.dumps(QUANT_CONFIG | {"w_bit": 3}))
    with pytest.raises(ModelError, match=r"quant_config\.json: w_bit is 3; it must be 4"):
        served([str(folder), *SHORT])


def test_what_a_quantized_model_takes_is_said(tmp_path: Path) -> None:
    """Its weights are unpacked here, so a card that the packed ones would fit is refused for the plain ones' size."""
    tensors: Tensors = {}
    for name, (dtype, shape) in tensors_of(LLAMA_3_8B, "F16").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = (dtype, shape)
            continue
        (n, k), stem = shape, name.removesuffix("weight")
        tensors |= {f"{stem}qweight": ("I32", (k, n // 8)), f"{stem}qzeros": ("I32", (k // 128, n // 8))}
        tensors[f"{stem}scales"] = ("F16", (k // 128, n))
    folder = write_model(tmp_path / "llama-3-8b-awq", LLAMA_3_8B, tensors)
    (folder / "quant_config.json").write_text(json.dumps(QUANT_CONFIG))
    report = looked_at(folder, RTX_3090, "--quantization=awq", "--max-model-len=8192", "--gpu-memory-utilization=0.90")
    facts = {fact.about: fact.text for fact in report.facts}
    assert facts["files"] == "1 of safetensors, 5.73 GB"
    assert facts["quantization"] == (
        "AWQ (quant_config.json): 4 bit, groups of 128; kernel: weights are unpacked at load and take the memory of "
        "plain ones"
    )
    assert plan_of(report).weights / GB == pytest.approx(16.06, abs=0.01)


# --- KV ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_block_sizes(machine: Path, kernel_cache: Path, size: int) -> None:
    flags = [*SHORT, f"--cache-dir={kernel_cache}", f"--block-size={size}"]
    ids, info = served([str(machine / "models/llama-7b-hf"), *flags])
    assert info.block_size == size
    assert len(ids) == 8


@pytest.mark.parametrize("size", [0, 8, 24, 512])
def test_block_sizes_that_are_none(size: int) -> None:
    with pytest.raises(SettingsError, match=r"--block-size: .*(16|256)"):
        EngineConfig.load(["m", f"--block-size={size}"], {}, prog="sluicegate engine")


def test_blocks_too_large_for_the_memory(machine: Path) -> None:
    """2 layers x 2 heads x 32 numbers x 4 bytes a token: 128 KiB are 256 tokens, one block of the largest size."""
    folder = str(machine / "models/llama-7b-hf")
    small = ["--device=cpu", "--threads=1", "--kv-cache-memory-bytes=128KiB", "--max-model-len=300"]
    with pytest.raises(ModelError) as caught:
        served([folder, *small, "--block-size=256"])
    assert str(caught.value) == (
        f"{folder}: One sequence of 300 tokens does not fit: there is memory for the KV of 256. "
        "Raise --kv-cache-memory-bytes, or set --max-model-len to at most 256."
    )


def test_a_context_of_32768_on_a_small_model(machine: Path, kernel_cache: Path) -> None:
    """A prompt of 2,000 tokens is answered as in a context that just holds it."""
    folder = str(machine / "models/llama-7b-hf")
    prompt = tuple(3 + (7 * place + place * place) % 110 for place in range(2000))
    cache = f"--cache-dir={kernel_cache}"
    ids, info = served([folder, *HERE, cache, "--max-model-len=32768"], prompt=prompt)
    assert info.context_length == 32768
    assert info.num_blocks * info.block_size >= 32768
    assert served([folder, *HERE, cache, "--max-model-len=2048"], prompt=prompt)[0] == ids


def test_a_context_that_the_model_has_not(plain: Weights, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", plain.stored, CONFIG | {"max_position_embeddings": 2048})
    with pytest.raises(ModelError) as caught:
        served([str(folder), *HERE, "--max-model-len=32768"])
    assert str(caught.value) == (
        f"{folder}: --max-model-len 32768 is more than the model's context, 2048. Set it to at most 2048."
    )


def test_a_context_that_the_memory_has_not(machine: Path) -> None:
    folder = str(machine / "models/llama-7b-hf")
    with pytest.raises(ModelError) as caught:
        served([folder, "--device=cpu", "--kv-cache-memory-bytes=1MiB", "--max-model-len=32768"])
    assert str(caught.value) == (
        f"{folder}: One sequence of 32768 tokens does not fit: there is memory for the KV of 2048. "
        "Raise --kv-cache-memory-bytes, or set --max-model-len to at most 2048."
    )


def test_max_num_seqs(small: Path) -> None:
    """More sequences need a wider step, and more than a step has tokens cannot run."""
    few, many = (plan_of(looked_at(small, A100, f"--max-num-seqs={count}")) for count in (8, 256))
    assert few.work < many.work
    with pytest.raises(SettingsError, match="--max-num-batched-tokens must be at least --max-num-seqs"):
        EngineConfig.load(["m", "--max-num-seqs=512"], {}, prog="sluicegate engine")


def test_float16_on_a_cpu_is_the_weights_alone(
    machine: Path, kernel_cache: Path, tmp_path: Path, plain: Weights
) -> None:
    """Activations are float32 there: the answers are those of the same weights in float32."""
    widened = {name: tensor.float() for name, tensor in plain.stored.items()}
    folder = write_folder(tmp_path / "wide", widened, CONFIG | {"torch_dtype": "float32"})
    flags = [*SHORT, f"--cache-dir={kernel_cache}"]
    assert all(tensor.dtype is torch.float16 for tensor in plain.stored.values())
    assert served([str(folder), *flags])[0] == served([str(machine / "models/llama-7b-hf"), *flags])[0]


# --- all of it -----------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_said_at_once(machine: Path, tmp_path: Path) -> None:
    """By the look that every start takes first."""
    folder = tmp_path / "llama-3-8b-awq"
    folder.mkdir()
    for file in (machine / "llama-3-8b-awq").iterdir():
        if file.name not in ("quant_config.json", "tokenizer.json"):
            (folder / file.name).symlink_to(file)
    with pytest.raises(ModelError) as caught:
        served([str(folder), *SHORT, "--quantization=awq", "--tensor-parallel-size=2", "--max-model-len=99999"])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{folder} has 4 problems:"
    assert lines[1].startswith(f"  1. --quantization awq: nothing in {folder} says that its weights are quantized. ")
    assert lines[2] == "  2. --max-model-len 99999 is more than the model's context, 32768. Set it to at most 32768."
    assert lines[3].startswith(f"  3. {folder} has no tokenizer.json, nor what one is made of")
    assert lines[4].startswith("  4. --tensor-parallel-size 2: an engine runs a model on one device so far.")
