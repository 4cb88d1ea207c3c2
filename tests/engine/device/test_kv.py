from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.device import kv
from engine.layers.rope import Rope
from engine.loading.store import ModelError
from engine.models.spec import LayerSpec, ModelSpec

SPEC = ModelSpec(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    context_length=512,
    max_context_length=512,
    layers=(LayerSpec(Rope(theta=1e4)),) * 3,
    norm_eps=1e-5,
    tied_head=True,
    dtype=None,
    attention_scale=0.25,
)
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, head_dim, positions, bfloat16


def test_pool_fills_the_memory() -> None:
    memory = 100 * BLOCK_BYTES + 5
    layout = kv.plan_kv(SPEC, block_size=16, dtype=torch.bfloat16, memory_bytes=memory, context_length=512)
    caches = layout.allocate(torch.device("cpu"))
    assert layout.num_blocks == 100
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == 100 * BLOCK_BYTES
    assert {cache.keys.dtype for cache in caches} == {torch.bfloat16}


def test_padding_of_heads_is_counted() -> None:
    spec = replace(SPEC, head_dim=20)
    layout = kv.plan_kv(spec, block_size=16, dtype=torch.float32, memory_bytes=10**7, context_length=512)
    used = sum(cache.keys.nbytes + cache.values.nbytes for cache in layout.allocate(torch.device("cpu")))
    assert 10**7 * 0.97 < used <= 10**7


def test_context_that_does_not_fit() -> None:
    memory = 31 * BLOCK_BYTES
    with pytest.raises(ModelError) as caught:
        kv.plan_kv(SPEC, block_size=16, dtype=torch.bfloat16, memory_bytes=memory, context_length=512)
    text = str(caught.value)
    assert "--max-model-len 512 needs 32 KV blocks" in text
    assert f"--kv-cache-memory-bytes {memory} holds 31" in text
    assert "at most 496" in text
