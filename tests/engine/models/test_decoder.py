"""The decoder, whatever its family: what a batch to be pruned leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernels
from tests.engine.device.test_layer_program import STEPS, decoder, step


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM"])
@torch.inference_mode()
def test_a_last_layer_of_sampled_rows_alone_has_their_bits(architecture: str) -> None:
    """And fills the pool for all tokens, which later steps read. A CPU attends for all: a schedule is a GPU's."""
    kernels.start()
    torch.set_num_threads(1)
    model, caches, others = decoder(architecture, torch.float32)
    nothing = replace(step((0, 0, 20)), sampled=torch.zeros(0, dtype=torch.int64))
    for batch in (nothing, *STEPS):
        pruned = batch
        if batch.sampled is not None:
            pruned = replace(batch, pruned=batch.attention)
            _, residual = model.through_layers(model.embedded(pruned), pruned, caches)
            assert residual.shape == (len(batch.sampled), 48)
        assert torch.equal(model.hidden(pruned, caches), model.hidden(batch, others))
