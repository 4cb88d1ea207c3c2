from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.store import ModelError
from engine.quant import LinearPart
from engine.quant.dequantized import Dequantized
from tests.engine.quant.checkpoints import module_folder, open_folder
from tests.engine.quant.packers import awq

# The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)

CONFIG: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["plain"],
}


@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantized_weights(tmp_path: Path, group_size: int, dtype: torch.dtype) -> None:
    packed = awq(40, 128, group_size=128 if group_size == -1 else group_size, dtype=dtype)
    reader, method = open_folder(module_folder(tmp_path, CONFIG | {"group_size": group_size}, {"m": packed}))
    assert isinstance(method, Dequantized)
    assert torch.equal(method.weight(reader, LinearPart("m", 40, 128)), packed.weight)
    reader.finish(())


def test_modules_that_were_not_converted_are_plain(tmp_path: Path) -> None:
    packed, plain = awq(32, 64), torch.randn(16, 64)
    reader, method = open_folder(module_folder(tmp_path, CONFIG, {"m": packed, "plain": plain}))
    layer = method.load(reader, [LinearPart("m", 32, 64), LinearPart("plain", 16, 64)])
    reader.finish(())
    x = torch.randn(3, 64)
    expected = x @ torch.cat([packed.weight, plain]).t()
    torch.testing.assert_close(layer.product(x, None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 8}, "bits is 8; it must be 4"),
        ({"group_size": -2}, "group_size is -2; it must be positive, or -1"),
        ({"version": "gemv"}, "version is 'gemv'; it must be GEMM"),
        ({"zero_point": False}, "zero_point is False; it must be true"),
    ],
)
def test_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        open_folder(module_folder(tmp_path, CONFIG | change, {"m": awq(32, 64)}))


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    reader, method = open_folder(module_folder(tmp_path, CONFIG, {"m": awq(32, 64)}))
    with pytest.raises(ModelError, match="m is 30 x 64; in AWQ the first is a multiple of 8"):
        method.load(reader, [LinearPart("m", 30, 64)])
    with pytest.raises(ModelError, match=r"m is 32 x 72; .* the group size, 32"):
        method.load(reader, [LinearPart("m", 32, 72)])
