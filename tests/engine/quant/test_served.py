"""A whole model of every format, served: it is the model of the dequantized weights."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.wanted import Wanted
from protocol.sampling import SamplingParams
from tests.engine.oracle import greedy_ids
from tests.engine.quant.packers import Packed, awq, gptq, packed_int, scaled_bytes
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import EOS_ID, NUM_NEW, prompt
from tests.engine.torch_runners import Settings, driver, load

pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
PROMPTS = (1, 5, 9)

#: GPTQ needs rows and columns that fill words; the tiny model's 112 are 3.5 of them.
INNER = 128

#: Linear layers, as transformers' quantizers choose them: no head, no router.
MODULES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")

GPTQ: dict[str, object] = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}
AWQ: dict[str, object] = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]}


def _fp8(rows: int, columns: int, seed: int) -> Packed:
    dtype, block = torch.float8_e4m3fn, (48, 48)
    return scaled_bytes(rows, columns, dtype=dtype, block=block, scale_name="weight_scale_inv", seed=seed)


#: The file that describes a format, what is in it, and the packer of a module.
FORMATS: dict[str, tuple[str, dict[str, object], Callable[[int, int, int], Packed]]] = {
    "gptq": ("quantize_config.json", GPTQ, lambda n, k, seed: gptq(n, k, act_order=True, seed=seed)),
    "awq": ("quant_config.json", AWQ, lambda n, k, seed: awq(n, k, seed=seed)),
    "compressed-tensors": ("config.json", PACKED, lambda n, k, seed: packed_int(n, k, seed=seed)),
    "fp8": ("config.json", FP8, _fp8),
}


def quantized(source: Path, path: Path, name: str, *, head: bool = False) -> tuple[Path, Path]:
    """Two models with the embeddings and norms of `source`: one quantized, with its `head` or without, and one of
    the weights that it stands for.
    """
    modules = (*MODULES, "lm_head.weight") if head else MODULES
    file, values, pack = FORMATS[name]
    config = json.loads((source / "config.json").read_text()) | {"intermediate_size": INNER}
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for seed, (tensor_name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if not tensor_name.endswith(modules):
            stored[tensor_name] = plain[tensor_name] = tensor
            continue
        rows, columns = (INNER if size == 112 else size for size in tensor.shape)
        packed = pack(rows, columns, seed)
        plain[tensor_name] = packed.weight
        stored |= {f"{tensor_name.removesuffix('weight')}{end}": value for end, value in packed.tensors.items()}
    for folder, tensors in ((path / name, stored), (path / f"{name}-plain", plain)):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    described = config | {"quantization_config": values} if file == "config.json" else values
    (path / name / file).write_text(json.dumps(described))
    return path / name, path / f"{name}-plain"


def served_ids(settings: Settings) -> list[list[int]]:
    runner, info = load(settings)
    run = driver(runner, info)
    return run.run([Sequence(prompt(number), GREEDY, ends=(EOS_ID,)) for number in PROMPTS])


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_plain_model(
    tiny_models: Path, tmp_path: Path, kernel_cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, name)
    with caplog.at_level(logging.INFO, "engine"):
        ids = served_ids(Settings(str(stored), quantization=name, cache_dir=kernel_cache))
    shown = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8"}.get(name, name)
    assert f"Loading {shown} model" in caplog.messages
    assert any(text.startswith(f"Using {shown} kernel: ") for text in caplog.messages)
    assert ids == served_ids(Settings(str(plain), cache_dir=kernel_cache))
    assert len({tuple(each) for each in ids}) == len(PROMPTS)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_head(tiny_models: Path, tmp_path: Path, kernel_cache: Path, name: str) -> None:
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, name, head=True)
    assert "lm_head.weight" not in load_file(stored / "model.safetensors") or name == "fp8"
    settings = Settings(str(stored), cache_dir=kernel_cache)
    assert served_ids(settings) == served_ids(replace(settings, model=str(plain)))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts(family_models: Path, tmp_path: Path, kernel_cache: Path, name: str) -> None:
    stored, plain = quantized(family_models / "mixtral", tmp_path, name)
    names = load_file(stored / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert ("model.layers.0.block_sparse_moe.experts.5.w3.weight" in names) == (name == "fp8")
    settings = Settings(str(stored), cache_dir=kernel_cache)
    assert served_ids(settings) == served_ids(replace(settings, model=str(plain)))
    assert check(stored, Wanted.by(EngineConfig(model=str(stored)), Device("cpu", "CPU"))).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_equals_transformers(tiny_models: Path, tmp_path: Path, kernel_cache: Path, name: str) -> None:
    """On the dequantized weights, in float32."""
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, name)
    expected = greedy_ids(plain, [prompt(number) for number in PROMPTS], NUM_NEW, tmp_path)
    assert served_ids(Settings(str(stored), cache_dir=kernel_cache)) == expected


def test_numerics_and_digest_know_the_quantization(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, "gptq")
    settings = Settings(str(plain), cache_dir=kernel_cache)
    rounded, other = replace(settings, quantization="fp8"), replace(settings, model=str(stored))
    infos = [load(each)[1] for each in (settings, rounded, other)]
    assert len({info.numerics for info in infos}) == 3
    assert infos[0].digest == infos[1].digest != infos[2].digest


def test_half_of_a_gptq_model(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, "gptq")
    half = Settings(str(stored), dtype="float16", cache_dir=kernel_cache)
    assert served_ids(half) == served_ids(replace(half, model=str(plain)))


def test_pitfalls(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """A flag on a plain model, the wrong flag, and a description that was not copied."""
    stored, plain = quantized(tiny_models / "llama_untied", tmp_path, "awq")
    with pytest.raises(ModelError, match=r"--quantization awq: .*config\.json has no quantization_config"):
        load(Settings(str(plain), quantization="awq", cache_dir=kernel_cache))
    with pytest.raises(ModelError, match=r"--quantization gptq contradicts the model: quant_config\.json says awq"):
        load(Settings(str(stored), quantization="gptq", cache_dir=kernel_cache))
    (stored / "quant_config.json").unlink()
    with pytest.raises(ModelError, match=r"a quantized weight, but nothing says how .*quant_config\.json \(AWQ\)"):
        load(Settings(str(stored), cache_dir=kernel_cache))


def test_biases_of_zeros_may_be_left(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """Older GPTQ tools write one for every layer."""
    stored, _ = quantized(tiny_models / "llama_untied", tmp_path, "gptq")
    tensors = load_file(stored / "model.safetensors")
    bias = torch.zeros(64)
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file(tensors | {name: bias}, stored / "model.safetensors")
    load(Settings(str(stored), cache_dir=kernel_cache))
    save_file(tensors | {name: bias + 1}, stored / "model.safetensors")
    with pytest.raises(ModelError, match=r"o_proj\.bias, which config\.json does not call for"):
        load(Settings(str(stored), cache_dir=kernel_cache))
