from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.store import ModelError
from engine.quant import LinearPart
from engine.quant.compressed_tensors import Groups
from tests.engine.quant.checkpoints import module_folder, open_folder
from tests.engine.quant.packers import Packed, packed_int, scaled_bytes

# The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)

FP8 = torch.float8_e4m3fn


def config(storage: str, *targets: str, **weights: object) -> dict[str, object]:
    group = {"targets": list(targets or ("Linear",)), "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def int4(**fields: object) -> dict[str, object]:
    weights: dict[str, object] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return config("pack-quantized", **weights | {"symmetric": True} | fields)


CASES: dict[str, tuple[dict[str, object], Packed]] = {
    "w4a16": (int4(), packed_int(24, 64)),
    "w4a16_asymmetric": (int4(symmetric=False), packed_int(20, 64, symmetric=False)),
    "w4a16_rows": (int4(strategy="channel", group_size=None), packed_int(24, 60, group_size=None)),
    "w4a16_last_group_cut": (int4(), packed_int(24, 72)),
    "w4a16_act_order": (int4(actorder="group"), packed_int(24, 64, act_order=True)),
    "w8a16": (int4(num_bits=8), packed_int(24, 64, bits=8)),
    "w8a8": (
        config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        scaled_bytes(24, 64, dtype=torch.int8, block=(1, 64)),
    ),
    "fp8_dynamic": (
        config("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        scaled_bytes(24, 64, dtype=FP8, block=(1, 64)),
    ),
    "fp8_block": (
        config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 16]),
        scaled_bytes(24, 40, dtype=FP8, block=(16, 16)),
    ),
    "fp8_matrix": (
        config("float-quantized", num_bits=8, type="float", strategy="tensor"),
        scaled_bytes(24, 40, dtype=FP8, block=(24, 40)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_dequantized_weights(tmp_path: Path, name: str) -> None:
    described, packed = CASES[name]
    reader, method = open_folder(module_folder(tmp_path, described, {"m": packed}))
    assert isinstance(method, Groups)
    rows, columns = packed.weight.shape
    assert torch.equal(method.weight(reader, LinearPart("m", rows, columns)), packed.weight)
    reader.finish(())


def test_int8_with_zero_points(tmp_path: Path) -> None:
    packed = scaled_bytes(8, 16, dtype=torch.int8, block=(1, 16))
    zeros = torch.arange(-4, 4, dtype=torch.int8)[:, None]
    scales = packed.tensors["weight_scale"].float()
    weight = (packed.tensors["weight"].float() - zeros.float()) * scales
    stored = Packed(packed.tensors | {"weight_zero_point": zeros}, weight)
    described = config("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False)
    reader, method = open_folder(module_folder(tmp_path, described, {"m": stored}))
    assert isinstance(method, Groups)
    assert torch.equal(method.weight(reader, LinearPart("m", 8, 16)), weight)


def test_groups_of_modules(tmp_path: Path) -> None:
    """One class for all but those whose names a pattern fits; a module without marks is plain."""
    described = int4()
    groups: Any = described["config_groups"]
    groups["group_1"] = {
        "targets": ["re:.*down_proj"],
        "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    }
    modules = {
        "a.down_proj": scaled_bytes(16, 32, dtype=torch.int8, block=(1, 32)),
        "a.up_proj": packed_int(16, 32),
        "a.gate_proj": torch.randn(16, 32),
    }
    reader, method = open_folder(module_folder(tmp_path, described, modules))
    layer = method.load(reader, [LinearPart(name, 16, 32) for name in modules])
    reader.finish(())
    x = torch.randn(3, 32)
    whole = torch.cat([part if isinstance(part, torch.Tensor) else part.weight for part in modules.values()])
    torch.testing.assert_close(layer.product(x, None), x @ whole.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (config("marlin-24", num_bits=4), "format .* 'marlin-24' in effect"),
        (int4(num_bits=3), "num_bits is 3; it with the type int and the format pack-quantized is not supported"),
        (int4(group_size=None), "group_size is None; it must be positive"),
        (int4(strategy="token"), "strategy is 'token'; it must be one of tensor, channel, group, block"),
        (config("float-quantized", num_bits=8, type="float", strategy="block"), "block_structure is None"),
        (config("pack-quantized", "re:(", num_bits=4), r"group_0: '\(' is no pattern of module names"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None; it must be an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": 1}}},
            "config_groups.g: targets is 1; it must be a list of names",
        ),
    ],
)
def test_refused(tmp_path: Path, described: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        open_folder(module_folder(tmp_path, described, {"m": torch.zeros(1)}))


def rotated(*locations: str) -> dict[str, object]:
    """A description with a rotation that is applied in these places."""
    steps = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    return int4() | {"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": steps}}}}


def test_rotations_of_weights_are_in_the_weights(tmp_path: Path) -> None:
    packed = packed_int(16, 64)
    reader, method = open_folder(module_folder(tmp_path, rotated("weight_input", "weight_output"), {"m": packed}))
    assert isinstance(method, Groups)
    assert torch.equal(method.weight(reader, LinearPart("m", 16, 64)), packed.weight)


@pytest.mark.parametrize("location", ["input", "output", "k_cache", "q_attn"])
def test_rotations_of_activations_are_refused(tmp_path: Path, location: str) -> None:
    described = rotated("weight_output", location)
    with pytest.raises(ModelError, match=rf"R: activations are rotated as the model runs \({location}\)"):
        open_folder(module_folder(tmp_path, described, {"m": packed_int(16, 64)}))
