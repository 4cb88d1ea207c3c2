from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.store import ModelError
from engine.quant import LinearPart
from engine.quant.dequantized import Dequantized
from tests.engine.quant.checkpoints import module_folder, open_folder
from tests.engine.quant.packers import Packed, gptq

# The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)

CONFIG: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def weight(path: Path, config: dict[str, object], packed: Packed) -> torch.Tensor:
    reader, method = open_folder(module_folder(path, config, {"m": packed}))
    assert isinstance(method, Dequantized)
    rows, columns = packed.weight.shape
    found = method.weight(reader, LinearPart("m", rows, columns))
    reader.finish(())
    return found


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantized_weights(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    packed = gptq(64, 128, bits=bits, group_size=group_size, symmetric=symmetric)
    config = CONFIG | {"bits": bits, "group_size": group_size, "sym": symmetric}
    assert torch.equal(weight(tmp_path, config, packed), packed.weight)


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_of_both_versions(tmp_path: Path, version: int) -> None:
    """The first stores them less one, and wraps: a zero point of 0 is stored as 15."""
    packed = gptq(64, 64, version=version)
    key = {1: {"checkpoint_format": "gptq"}, 2: {"checkpoint_format": "gptq_v2"}}[version]
    assert torch.equal(weight(tmp_path, CONFIG | key, packed), packed.weight)


def test_act_order_takes_each_rows_own_group(tmp_path: Path) -> None:
    packed = gptq(32, 256, group_size=128, act_order=True)
    assert not torch.equal(packed.tensors["g_idx"], torch.arange(256, dtype=torch.int32) // 128)
    found = weight(tmp_path, CONFIG | {"group_size": 128, "desc_act": True}, packed)
    assert torch.equal(found, packed.weight)


def test_without_group_indices_groups_are_in_order(tmp_path: Path) -> None:
    packed = gptq(32, 64)
    tensors = {name: tensor for name, tensor in packed.tensors.items() if name != "g_idx"}
    assert torch.equal(weight(tmp_path, CONFIG, Packed(tensors, packed.weight)), packed.weight)


def test_layer_of_several_parts(tmp_path: Path) -> None:
    parts = {"q": gptq(64, 64, seed=1), "k": gptq(32, 64, seed=2), "v": torch.randn(32, 64)}
    reader, method = open_folder(module_folder(tmp_path, CONFIG, parts))
    layer = method.load(reader, [LinearPart("q", 64, 64), LinearPart("k", 32, 64), LinearPart("v", 32, 64)])
    reader.finish(())
    x = torch.randn(5, 64)
    whole = torch.cat([part if isinstance(part, torch.Tensor) else part.weight for part in parts.values()])
    torch.testing.assert_close(layer.product(x, None), x @ whole.t(), rtol=1e-4, atol=1e-4)


def test_weights_are_rounded_to_the_dtype_in_force(tmp_path: Path) -> None:
    packed = gptq(32, 64)
    reader, method = open_folder(module_folder(tmp_path, CONFIG, {"m": packed}), torch.bfloat16)
    assert isinstance(method, Dequantized)
    assert torch.equal(method.weight(reader, LinearPart("m", 32, 64)), packed.weight.bfloat16())


def test_modules_that_are_quantized_otherwise(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the first pattern that matches decides, and what it leaves plain has plain tensors."""
    dynamic = {r"-:.*\.k$": {}, r"+:.*\.q": {"bits": 8, "group_size": -1}, r".*\.(q|v)": {"group_size": 64}}
    parts = {
        "a.q": gptq(64, 128, bits=8, group_size=-1, seed=1),
        "a.k": torch.randn(32, 128),
        "a.v": gptq(32, 128, group_size=64, seed=2),
        "a.o": gptq(64, 128, seed=3),
    }
    reader, method = open_folder(module_folder(tmp_path, CONFIG | {"dynamic": dynamic}, parts))
    assert isinstance(method, Dequantized)
    for name, part in parts.items():
        expected = part if isinstance(part, torch.Tensor) else part.weight
        assert torch.equal(method.weight(reader, LinearPart(name, *expected.shape)), expected)
    reader.finish(())
    assert method.name == r"gptq 4 bits, .*\.q: gptq 8 bits, .*\.(q|v): gptq 4 bits, dequantized"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 5}, "bits is 5; it must be 2, 3, 4 or 8"),
        ({"bits": "four"}, "bits is 'four'; it must be an integer"),
        ({"group_size": 0}, "group_size is 0; it must be positive, or -1"),
        ({"dynamic": {"+:(": {}}}, r"dynamic: '\(' is no pattern of module names: missing \)"),
        ({"dynamic": {"+:a": {"bits": 5}}}, r"dynamic\.\+:a: bits is 5; it must be 2, 3, 4 or 8"),
        ({"dynamic": {"+:a": 8}}, r"dynamic: \+:a is 8; it must be an object"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; it must be gptq or gptq_v2"),
    ],
)
def test_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        open_folder(module_folder(tmp_path, CONFIG | change, {"m": gptq(32, 64)}))


def test_another_group_size_than_the_tensors_have(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.qzeros has the shape \[2, 8\]; config\.json calls for \[1, 8\]"):
        weight(tmp_path, CONFIG | {"group_size": 64}, gptq(64, 64))


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    packed = gptq(32, 64)
    packed.tensors["g_idx"][3] = 2
    with pytest.raises(ModelError, match=r"m\.g_idx names groups 0 to 2; m\.scales has 2"):
        weight(tmp_path, CONFIG, packed)


def test_sizes_that_do_not_fill_words(tmp_path: Path) -> None:
    reader, method = open_folder(module_folder(tmp_path, CONFIG, {"m": gptq(32, 64)}))
    with pytest.raises(ModelError, match="m is 32 x 60; in GPTQ of 4 bits both times the bits are multiples of 32"):
        method.load(reader, [LinearPart("m", 32, 60)])
