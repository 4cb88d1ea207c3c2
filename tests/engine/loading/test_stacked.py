from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loading.formats import Checkpoint
from engine.loading.store import ModelFolder


def test_matrices_are_those_of_the_stack(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 10, 7).bfloat16(), torch.randn(3, 7, 5)
    tensors = {"a.experts.gate_up_proj": gate_up, "a.experts.down_proj": down, "b": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(ModelFolder(tmp_path))
    wanted = {"b": torch.ones(2)}
    for expert in range(3):
        gate, up = gate_up[expert].chunk(2)
        matrices = {"gate": gate, "up": up, "down": down[expert]}
        wanted |= {f"a.experts.{expert}.{part}_proj.weight": matrix for part, matrix in matrices.items()}
    assert checkpoint.entries.keys() == wanted.keys()
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in wanted.items():
        assert checkpoint.entries[name].shape == tensor.shape
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a.experts.gate_up_proj", (3, 9, 7)),
        ("a.experts.gate_up_proj", (30, 7)),
        ("a.experts.down_proj", (10**9, 0, 5)),
        ("a.experts.0.down_proj.weight", (7, 5)),
        ("a.mlp.down_proj", (3, 7, 5)),
    ],
)
def test_what_is_no_stack_is_left(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file({name: torch.empty(shape)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint(ModelFolder(tmp_path)).entries[name].shape == shape
