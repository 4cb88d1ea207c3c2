from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.loading.quantization import Quantization, check_described, read_quantization
from engine.loading.store import ModelError, ModelFolder

#: As AutoAWQ and auto-gptq wrote them before they named the method.
OLD_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
OLD_GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "model_name_or_path": "x"}


def folder(path: Path, **files: object) -> ModelFolder:
    for name, value in {"config": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return ModelFolder(path)


def test_plain(tmp_path: Path) -> None:
    assert read_quantization(folder(tmp_path), None) is None


@pytest.mark.parametrize("method", ["awq", "compressed-tensors", "fp8", "gptq"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("confirmed", [True, False])
def test_config(tmp_path: Path, method: str, key: str, confirmed: bool) -> None:
    values = {"quant_method": method, "bits": 4}
    found = read_quantization(folder(tmp_path, config={key: values}), method if confirmed else None)
    assert found == Quantization(method, f"config.json: {key}", values)


@pytest.mark.parametrize(
    ("file", "values", "method"),
    [
        ("quantize_config", OLD_GPTQ, "gptq"),
        ("quant_config", OLD_AWQ, "awq"),
        ("quantize_config", {"quant_method": "awq", "bits": 4, "group_size": 64}, "awq"),
        ("quantize_config", {"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, "awq"),
    ],
)
def test_files_of_the_tools(tmp_path: Path, file: str, values: dict[str, object], method: str) -> None:
    found = read_quantization(folder(tmp_path, **{file: values}), None)
    assert found == Quantization(method, f"{file}.json", values)


def test_config_wins_over_files(tmp_path: Path) -> None:
    model = folder(tmp_path, config={"quantization_config": {"quant_method": "awq"}}, quantize_config=OLD_GPTQ)
    found = read_quantization(model, None)
    assert found is not None
    assert found.method == "awq"


def test_names_of_files_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "model-4bit-awq.safetensors").write_bytes(b"")
    assert read_quantization(folder(tmp_path), None) is None


def test_flag_that_contradicts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--quantization awq contradicts .*: quantize_config\.json says gptq\."):
        read_quantization(folder(tmp_path, quantize_config=OLD_GPTQ), "awq")


@pytest.mark.parametrize("asked", ["awq", "gptq", "compressed-tensors"])
def test_flag_on_a_plain_model(tmp_path: Path, asked: str) -> None:
    text = rf"--quantization {asked}: .*no quantization_config, .*quantize_config\.json nor quant_config\.json\. Copy"
    with pytest.raises(ModelError, match=text):
        read_quantization(folder(tmp_path), asked)


def test_fp8_of_a_plain_model_is_made_at_load(tmp_path: Path) -> None:
    assert read_quantization(folder(tmp_path), "fp8") == Quantization("fp8", "--quantization fp8", {})


@pytest.mark.parametrize("values", [{"quant_method": "bitsandbytes"}, {"bits": 4}, {}])
def test_method_that_is_not_known(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"method is '\w+'; supported are awq, compressed-tensors, fp8, gptq\."):
        read_quantization(folder(tmp_path, config={"quantization_config": values}), None)


def test_description_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="quantization_config must be an object, not 'gptq'"):
        read_quantization(folder(tmp_path, config={"quantization_config": "gptq"}), None)


def test_tensors_and_description_agree(tmp_path: Path) -> None:
    model = folder(tmp_path)
    described = Quantization("gptq", "quantize_config.json", OLD_GPTQ)
    online = Quantization("fp8", "--quantization fp8", {})
    quantized, plain = ["a.q_proj.qweight", "norm.weight"], ["a.q_proj.weight"]
    check_described(described, quantized, model)
    check_described(None, plain, model)
    check_described(online, plain, model)
    with pytest.raises(
        ModelError, match=r"holds a\.q_proj\.qweight.*neither quantize_config\.json \(GPTQ\) nor quant_c"
    ):
        check_described(None, quantized, model)
    with pytest.raises(ModelError, match=r"quantize_config\.json says .* quantized \(gptq\), but none is"):
        check_described(described, plain, model)


def test_fields() -> None:
    values = Quantization("gptq", "file", {"a": 3, "b": True, "c": "GEMM", "d": [1, 2], "e": {"f": 1}, "g": None})
    assert (values.integer("a"), values.integer("g", 7), values.integer("x", 8)) == (3, 7, 8)
    assert (values.flag("b", False), values.flag("x", True)) == (True, True)
    assert (values.text("c", ""), values.text("x", "default")) == ("gemm", "default")
    assert (values.sizes("d"), values.sizes("x")) == ((1, 2), None)
    assert values.inner("e").integer("f") == 1
    with pytest.raises(ModelError, match=r"file\.e: x is None; it must be an integer"):
        values.inner("e").integer("x")
