from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading.quantization import Quantization
from engine.loading.store import ModelError
from engine.quant import ExpertParts, LinearPart, method_of
from engine.quant.dequantized import Dequantized
from engine.quant.unquantized import UnquantizedWeight
from kernels import Activation
from tests.engine.quant.checkpoints import module_folder, open_folder
from tests.engine.quant.packers import Packed, scaled_bytes

# The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)

FP8 = torch.float8_e4m3fn


def test_blocks_with_the_last_ones_cut(tmp_path: Path) -> None:
    packed = scaled_bytes(20, 40, dtype=FP8, block=(16, 16), scale_dtype=torch.float32, scale_name="weight_scale_inv")
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    reader, method = open_folder(module_folder(tmp_path, config, {"m": packed}))
    assert isinstance(method, Dequantized)
    assert torch.equal(method.weight(reader, LinearPart("m", 20, 40)), packed.weight)
    reader.finish(())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_the_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    packed = scaled_bytes(8, 16, dtype=FP8, block=(8, 16), scale_dtype=torch.float32)
    tensors = packed.tensors | {
        "weight_scale": packed.tensors["weight_scale"].reshape(shape),
        "input_scale": torch.ones(shape),
    }
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    reader, method = open_folder(module_folder(tmp_path, config, {"m": Packed(tensors, packed.weight)}))
    assert isinstance(method, Dequantized)
    assert torch.equal(method.weight(reader, LinearPart("m", 8, 16)), packed.weight)
    reader.finish((".input_scale",))


def test_plain_weights_rounded_as_they_are_loaded(tmp_path: Path) -> None:
    weight = torch.randn(32, 64)
    weight[3] = 0
    path = module_folder(tmp_path, {"quant_method": "fp8"}, {"m": weight})
    reader, _ = open_folder(path)
    method = method_of(Quantization("fp8", "--quantization fp8", {}))
    assert method.name == "fp8 by row, made at load, dequantized"
    layer = method.load(reader, [LinearPart("m", 32, 64)])
    assert isinstance(layer, UnquantizedWeight)
    found = layer.packed.rows(torch.arange(32))
    assert torch.equal(found[3], weight[3])
    others = torch.arange(32) != 3
    found, weight = found[others], weight[others]
    largest = weight.abs().amax(1, keepdim=True)
    scale = largest / 448
    # e4m3 has 3 bits after the leading one: half a step is 1/16 of a value, or 2**-10 near zero.
    error = (found - weight).abs()
    assert bool((error <= torch.maximum(weight.abs() / 16, scale * 2**-10) * 1.001).all())
    assert torch.equal((found / scale).to(FP8).float(), (weight / scale).to(FP8).float())


def test_the_head_stays_plain_when_weights_are_rounded(tmp_path: Path) -> None:
    weight = torch.randn(32, 64)
    reader, _ = open_folder(module_folder(tmp_path, {"quant_method": "fp8"}, {"head": weight}))
    method = method_of(Quantization("fp8", "--quantization fp8", {}))
    head = method.load_logits(reader, LinearPart("head", 32, 64))
    assert isinstance(head, UnquantizedWeight)
    assert torch.equal(head.packed.rows(torch.arange(32)), weight)


def test_experts_are_rounded_as_linear_layers_are(tmp_path: Path) -> None:
    shapes = {"gate": (16, 32), "up": (16, 32), "down": (32, 16)}
    parts = [LinearPart(name, *shape) for name, shape in shapes.items()]
    path = module_folder(tmp_path, {"quant_method": "fp8"}, {n: torch.randn(shape) for n, shape in shapes.items()})
    reader, _ = open_folder(path)
    method = method_of(Quantization("fp8", "--quantization fp8", {}))
    x, chosen, weights = torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    found = method.load_experts(reader, [ExpertParts(*parts)]).mixed(x, chosen, weights)
    gated = method.load(reader, parts[:2]).gated_product(x, None, Activation.SILU)
    assert torch.equal(found, method.load(reader, parts[2:]).product(gated, None))


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="fmt is 'e5m2'; it must be e4m3"):
        open_folder(module_folder(tmp_path, {"quant_method": "fp8", "fmt": "e5m2"}, {"m": torch.zeros(1)}))
    config = {"quant_method": "fp8", "weight_block_size": [128]}
    with pytest.raises(ModelError, match=r"weight_block_size is \[128\]; it must be a list of two positive integers"):
        open_folder(module_folder(tmp_path, config, {"m": torch.zeros(1)}))
