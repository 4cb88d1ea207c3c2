"""What is left for the KV pool, on a GPU that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

import kernels
from engine.device.gpu_memory import WorstStep, kv_memory_bytes
from engine.loading.store import ModelError
from engine.models.spec import ModelSpec

pytest.importorskip("triton")  # attention's own memory is said by its kernels' module

GIB = 2**30
CPU = torch.device("cpu")
SIZES = (32, 8, 128)
SPEC = cast(ModelSpec, SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=1000))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, of which 15 are weights, 1 is other programs'."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def left(step: WorstStep, utilization: float = 0.9) -> int:
    return kv_memory_bytes(
        step,
        SPEC,
        device=CPU,
        dtype=torch.bfloat16,
        max_num_seqs=40,
        context_length=4096,
        utilization=utilization,
    )


@pytest.mark.parametrize(("num_tokens", "most_tokens"), [(8192, 1024), (600, 512), (15, 40)])
def test_graphs_have_the_logits_of_the_most_rows_twice_and_the_activations_of_the_largest(
    num_tokens: int, most_tokens: int
) -> None:
    graphs = 2 * 4 * 1000 * 40 + 3 * GIB * most_tokens // num_tokens
    graphs += 2 * kernels.attention_scratch_bytes(*SIZES, 40, 4096, CPU)
    assert left(WorstStep(num_tokens, 18 * GIB, 0.1)) == int(80 * GIB * 0.9) - 18 * GIB - graphs - GIB - GIB


def test_nothing_left_says_what_takes_it() -> None:
    with pytest.raises(ModelError, match=r"a GPU has 80\.0 GiB.*0\.2 of it is 16\.0 GiB.*15\.0 GiB.*nothing is left"):
        left(WorstStep(8192, 18 * GIB, 0.1), 0.2)


@pytest.mark.parametrize(
    ("seconds", "most"),
    [(0.300, 768), (0.370, 768), (0.400, 768), (0.640, 512), (1.0, 256), (1.1, 128), (5.0, 128), (0.01, 16384)],
)
def test_a_step_with_others_prompts_takes_20_ms(seconds: float, most: int) -> None:
    """In whole tiles of products, two and more; the least is one, the most a step."""
    assert WorstStep(16384, 0, seconds).prefill_tokens == most
