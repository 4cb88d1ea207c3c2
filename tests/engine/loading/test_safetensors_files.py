"""Tensors of every type out of files that the format's own library wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.safetensors_files import DTYPES, SafetensorsFile
from engine.loading.store import ModelError


def test_every_type(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: (torch.randn(7, 33, generator=generator) * 50).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "large": torch.randn(1000, 3000)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "I64"])
def test_parts(tmp_path: Path, dtype: str) -> None:
    x = torch.arange(77).view(7, 11).to(DTYPES[dtype])
    save_file({"x": x, "vector": x[0].clone()}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for rows, columns in ((range(2, 5), range(11)), (range(7), range(3, 4)), (range(6, 7), range(4, 11))):
        read = file.read("x", (rows, columns))
        assert read.is_contiguous()
        assert read.float().tolist() == x[rows.start : rows.stop, columns.start : columns.stop].float().tolist()
    assert file.read("vector", (range(4, 9),)).float().tolist() == x[0, 4:9].float().tolist()


def test_a_tensor_is_in_memory_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(1000)}, path)
    tensor = SafetensorsFile(path).read("a")
    os.truncate(path, 0)
    assert torch.equal(tensor, torch.arange(1000))


def test_a_file_that_is_cut_or_gone_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(1000)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, 4000)
    with pytest.raises(ModelError, match=r"a\.safetensors was cut while it was read"):
        file.read("a")
    path.unlink()
    with pytest.raises(ModelError, match=r"a\.safetensors cannot be read: No such file"):
        file.read("a")


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [("F4", [4], "a is F4; supported are F64, "), ("F32", [2], r"malformed safetensors header: a, F32 \[2\], has 4")],
)
def test_what_no_tensor_can_be(tmp_path: Path, dtype: str, shape: list[int], text: str) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match=text):
        SafetensorsFile(path).read("a")
