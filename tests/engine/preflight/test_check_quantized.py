"""A look at quantized checkpoints: described or not, and described wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.preflight import check
from engine.preflight.devices import Device
from tests.engine.preflight.folders import CONFIG, Tensors, tensors_of, write_model
from tests.engine.preflight.looks import WANTED, facts, problems


def quantized(method: str, *, head: bool = False) -> tuple[dict[str, object], Tensors]:
    """The description and the tensors of a checkpoint in groups of 128, the head among them or not."""
    described: dict[str, object] = {"quant_method": method, "bits": 4, "group_size": 128}
    if method == "awq":
        described |= {"zero_point": True, "version": "gemm"}
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        described = {"quant_method": method, "format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    if method == "fp8":
        described = {"quant_method": method, "weight_block_size": [128, 128]}
    tensors: Tensors = {}
    for name, (dtype, shape) in tensors_of(CONFIG, "F16").items():
        if "_proj" not in name and not (head and name.startswith("lm_head")):
            tensors[name] = (dtype, shape)
            continue
        (n, k), stem = shape, name.removesuffix("weight")
        parts = {
            "gptq": {"qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // 128, n // 8)), "g_idx": ("I32", (k,))},
            "awq": {"qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // 128, n // 8))},
            "compressed-tensors": {"weight_packed": ("I32", (n, k // 8)), "weight_shape": ("I64", (2,))},
            "fp8": {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", (n // 128, k // 128))},
        }[method]
        if method in ("gptq", "awq"):
            parts["scales"] = ("F16", (k // 128, n))
        if method == "compressed-tensors":
            parts["weight_scale"] = ("BF16", (n, k // 128))
        tensors |= {stem + part: value for part, value in parts.items()}  # type: ignore[misc]
    return described, tensors


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8"])
def test_quantized(tmp_path: Path, method: str, head: bool) -> None:
    described, tensors = quantized(method, head=head)
    folder = write_model(tmp_path / "m", CONFIG | {"quantization_config": described}, tensors)
    report = check(folder, replace(WANTED, quantization=method))
    assert [str(problem) for problem in report.problems] == []
    assert "kernel: weights are unpacked at load" in facts(report)["quantization"]
    write_model(
        folder,
        CONFIG | {"quantization_config": described},
        {
            name: (dtype, (*shape[:-1], shape[-1] * 2))
            if name.endswith(("scales", "_scale", "_inv"))
            else (dtype, shape)
            for name, (dtype, shape) in tensors.items()
        },
    )
    assert ("says group_size 128" if method == "compressed-tensors" else "has the shape") in problems(folder)[0]


def test_rotated_activations(tmp_path: Path) -> None:
    described, tensors = quantized("compressed-tensors")
    described["transform_config"] = {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}
    folder = write_model(tmp_path / "m", CONFIG | {"quantization_config": described}, tensors)
    (found,) = problems(folder)
    assert "transform_config.config_groups.R4: activations are rotated as the model runs (input)" in found


@pytest.mark.parametrize(
    ("method", "where", "tensor"),
    [
        ("gptq", "config.json: quantization_config", "scales"),
        ("awq", "config.json: quantization_config", "scales"),
        (
            "compressed-tensors",
            "config.json: quantization_config.config_groups.group_0.weights",
            "weight_scale",
        ),
    ],
)
def test_groups_of_another_size(tmp_path: Path, method: str, where: str, tensor: str) -> None:
    described, tensors = quantized(method)
    text = json.dumps(described).replace('"group_size": 128', '"group_size": 64')
    folder = write_model(tmp_path / "m", CONFIG | {"quantization_config": json.loads(text)}, tensors)
    assert problems(folder) == [
        f"{where} says group_size 64, with which 4096 columns have 64 scales; model.safetensors: "
        f"model.layers.0.self_attn.q_proj.{tensor} has 32, one for 128 columns. "
        "Set group_size to 128, or take description and weights from one source."
    ]


def test_kv_cache_in_fp8(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    described = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    scales: Tensors = {f"model.layers.{n}.self_attn.{p}_scale": ("F32", (1,)) for n in range(4) for p in "kv"}
    folder = write_model(tmp_path / "m", CONFIG | {"quantization_config": described}, tensors_of(CONFIG) | scales)
    on_cpu = replace(WANTED, device=Device("cpu", "CPU"), max_model_len=1024, kv_cache_memory_bytes=2**30)
    report = check(folder, on_cpu)
    assert [str(problem) for problem in report.problems] == []
    assert facts(report)["quantization"].startswith("none of weights; scales of keys and values (config.json: ")
    assert facts(report)["KV cache"] == "fp8"
    wide = check(folder, replace(on_cpu, kv_cache_dtype="bfloat16")).memory
    assert report.memory is not None
    assert wide is not None
    assert report.memory.kv_per_token == wide.kv_per_token // 2 == 4 * 2 * 8 * 128
    assert report.memory.max_sequences == 2 * (wide.max_sequences or 0) == 128
    assert problems(folder, kv_cache_dtype="fp8") == []  # on a GPU of unknown kind
    (found,) = problems(folder, kv_cache_dtype="fp8", device=Device("cuda", "A100", 80 * 2**30, 1, (8, 0)))
    assert found == (
        "--kv-cache-dtype fp8: FP8 needs a GPU of compute capability 8.9 or more; A100 has 8.0. Leave it out, or use "
        "--device cpu."
    )


def test_quantized_without_a_word_of_it(tmp_path: Path) -> None:
    _, tensors = quantized("gptq")
    found = problems(write_model(tmp_path / "m", CONFIG, tensors))
    assert "nothing says how it is quantized" in found[0]
