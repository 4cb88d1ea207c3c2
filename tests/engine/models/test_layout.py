"""The layout of a model is what its decoder takes, for every family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from engine.loading.formats import Region
from engine.loading.weights import DummyWeights
from engine.models import FAMILIES, family_of
from engine.models.config import ConfigFields
from engine.models.decoder import Decoder
from engine.models.layout import layout_of
from engine.quant.unquantized import Unquantized

CONFIG: dict[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


class Recorder(DummyWeights):
    """Notes what is taken."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))
        self.taken: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...], region: Region | None = None) -> Tensor:
        assert name not in self.taken
        self.taken[name] = shape
        return super().take(name, shape, region)


@pytest.mark.parametrize(
    "special",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "no_bias": False},
    ],
    ids=["tied", "biases"],
)
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_layout(architecture: str, special: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "pack_linear", lambda *weights: weights)  # what is done with weights does not matter
    family = family_of([architecture])
    spec = family.spec(ConfigFields(CONFIG | special | {"architectures": [architecture]}))
    reader = Recorder()
    Decoder(spec, family.names, reader=reader, method=Unquantized(), dtype=torch.float32, num_positions=64)
    layout = layout_of(spec, family.names)
    expected = dict(layout.plain)
    for matrix in layout.matrices:
        expected[f"{matrix.name}.weight"] = (matrix.rows, matrix.columns)
        if matrix.bias:
            expected[f"{matrix.name}.bias"] = (matrix.rows,)
    assert expected == reader.taken
