"""Layers run as one program: the decoder's own bits, for every family and any number of tokens."""

from __future__ import annotations

import logging

import pytest
import torch

import kernels
from engine.device.kv import KVLayout
from engine.device.layer_program import LayerProgram
from engine.layers.attention import ForwardBatch, LayerCache
from engine.loading.weights import DummyWeights
from engine.models import FAMILIES, family_of
from engine.models.config import ConfigFields
from engine.models.decoder import Decoder
from engine.quant import method_of

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, TABLE = 40, 16, 20

CONFIG: dict[str, object] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 12,
    "max_position_embeddings": 320,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "rope_local_base_freq": 10000.0}


@pytest.fixture(autouse=True)
def _native() -> None:
    if kernels.start() is not kernels.Implementation.NATIVE:
        pytest.skip("no C++ compiler here")
    torch.set_num_threads(1)
    kernels.set_num_threads(1)


def decoder(architecture: str, dtype: torch.dtype) -> tuple[Decoder, list[LayerCache], list[LayerCache]]:
    """A model with random weights and two pools, for the program and for the operators."""
    config = CONFIG | (GEMMA if architecture.startswith("Gemma") else {"sliding_window": 24})
    family = family_of([architecture])
    spec = family.spec(ConfigFields(config))
    model = Decoder(
        *(spec, family.names),
        reader=DummyWeights(dtype, CPU),
        method=method_of(None),
        dtype=dtype,
        num_positions=TABLE * BLOCK_SIZE,
    )
    kv = KVLayout(NUM_BLOCKS, BLOCK_SIZE, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    return model, kv.allocate(CPU), kv.allocate(CPU)


TABLES = torch.arange(2 * TABLE, dtype=torch.int32).view(2, TABLE)


def step(*parts: tuple[int, int, int], sampled: list[int] | None = None) -> ForwardBatch:
    """Tokens of (sequence, first position, count), as the runner lays them out."""
    index = torch.cat([torch.full((count,), sequence, dtype=torch.int32) for sequence, _, count in parts])
    positions = torch.cat([torch.arange(first, first + count, dtype=torch.int32) for _, first, count in parts])
    slots = TABLES[index.long(), positions.long() // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = None if sampled is None else torch.tensor(sampled)
    return ForwardBatch(positions.long() * 7 % 90, slots, kernels.AttentionBatch(TABLES, index, positions), rows)


#: A prompt, a mixed step, single tokens, and a chunk that needs larger buffers than there are.
STEPS = (
    step((0, 0, 33), sampled=[32]),
    step((0, 33, 1), (1, 0, 20), sampled=[0, 20]),
    step((0, 34, 1), (1, 20, 1)),
    step((1, 21, 270), sampled=[0, 269]),
    step((0, 35, 1), (1, 291, 1)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_bits_are_those_of_the_decoder(architecture: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, caches, others = decoder(architecture, dtype)
    layers = LayerProgram(model, caches)
    for batch in STEPS:
        assert torch.equal(layers.hidden(batch), model.hidden(batch, others))
    assert not caplog.records, "every family can be recorded"


@torch.inference_mode()
def test_layers_that_cannot_be_recorded_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, caches, others = decoder("LlamaForCausalLM", torch.float32)
    through = model.through_layers

    def doubled(
        embedded: torch.Tensor, batch: ForwardBatch, caches: list[LayerCache]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return through(embedded * 2, batch, caches)

    monkeypatch.setattr(model, "through_layers", doubled)
    layers = LayerProgram(model, caches)
    for batch in STEPS[:3]:
        assert torch.equal(layers.hidden(batch), model.hidden(batch, others))
    assert [record.message for record in caplog.records] == [
        "layers run operator by operator: torch's mul cannot be a part of a program."
    ]
