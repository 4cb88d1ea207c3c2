from __future__ import annotations

import pytest

from engine.loading.kv_cache import kv_cache_dtype
from engine.loading.quantization import Quantization
from engine.loading.store import ModelError

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def made_for_fp8(**change: object) -> Quantization:
    return Quantization("compressed-tensors", "config.json: quantization_config", {"kv_cache_scheme": SCHEME | change})


@pytest.mark.parametrize(
    ("asked", "on_cpu", "fp8_checkpoint", "expected"),
    [
        ("auto", True, False, "bfloat16"),
        ("auto", True, True, "fp8"),
        ("auto", False, True, "fp8"),
        ("bfloat16", True, True, "bfloat16"),
        ("float16", True, False, "float16"),
        ("bfloat16", False, False, "bfloat16"),
        ("fp8", True, False, "fp8"),
        ("fp8_e4m3", True, True, "fp8"),
        ("fp8", False, False, "fp8"),
        ("fp8_e4m3", False, True, "fp8"),
    ],
)
def test_what_is_asked(asked: str, on_cpu: bool, fp8_checkpoint: bool, expected: str) -> None:
    quantization = made_for_fp8() if fp8_checkpoint else Quantization("gptq", "quantize_config.json", {"bits": 4})
    assert kv_cache_dtype(asked, quantization, active="bfloat16", on_cpu=on_cpu) == expected
    if not fp8_checkpoint:
        assert kv_cache_dtype(asked, None, active="bfloat16", on_cpu=on_cpu) == expected


def test_autofp8s_word_for_it() -> None:
    quantization = Quantization("fp8", "config.json: quantization_config", {"kv_cache_scheme": "static"})
    assert kv_cache_dtype("auto", quantization, active="bfloat16", on_cpu=True) == "fp8"


def test_another_type_on_a_gpu() -> None:
    with pytest.raises(ModelError, match=r"dtype float16: .*type of activations, bfloat16, or fp8\. Leave it out"):
        kv_cache_dtype("float16", None, active="bfloat16", on_cpu=False)


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_a_gpu_without_fp8(asked: str) -> None:
    lacking = "FP8 needs a GPU of compute capability 8.9 or more; A100 has 8.0."
    assert kv_cache_dtype("auto", made_for_fp8(), active="bfloat16", on_cpu=False, lacks_fp8=lacking) == "bfloat16"
    with pytest.raises(ModelError, match=rf"^--kv-cache-dtype fp8: {lacking} Leave it out, or use --device cpu\.$"):
        kv_cache_dtype(asked, None, active="bfloat16", on_cpu=False, lacks_fp8=lacking)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"type": "int"}, r"kv_cache_scheme: type is 'int'; it must be 'float'; --kv-cache-dtype bfloat16 does"),
        ({"strategy": "attn_head"}, "strategy is 'attn_head'; it must be 'tensor'"),
        ({"dynamic": True}, "dynamic is True; it must be False"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "fp8"])
def test_other_schemes(asked: str, change: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        kv_cache_dtype(asked, made_for_fp8(**change), active="bfloat16", on_cpu=True)
    assert kv_cache_dtype("bfloat16", made_for_fp8(**change), active="bfloat16", on_cpu=True) == "bfloat16"
