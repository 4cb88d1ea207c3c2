"""The torch runner on a GPU under the real scheduler, two steps in flight: no bit changes. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.device import gpu_inputs
from protocol.sampling import SamplingParams
from tests.engine.backends.test_torch_runner_core import submit
from tests.engine.core_loop import Answer, Loop, same
from tests.engine.tiny_models import PROMPT_LENGTHS, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SUBMITS = [submit(number) for number in range(len(PROMPT_LENGTHS))]

#: Bytes of a block: layers, heads, head_dim of keys and values, positions, float32.
BLOCK_BYTES = 3 * 2 * (16 + 16) * 16 * 4


def loop(tiny_models: Path, cache: Path, num_blocks: int = 2000, **values: object) -> Loop:
    return Loop(
        tiny_models / "llama_bias",
        depth=2,
        num_blocks=num_blocks,
        device="cuda",
        cache_dir=cache,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
        **values,
    )


@pytest.fixture(scope="module")
def alone(tiny_models: Path, kernel_cache: Path) -> dict[int, Answer]:
    one = loop(tiny_models, kernel_cache, enable_prefix_caching=False, max_model_len=400)
    answers: dict[int, Answer] = {}
    for message in SUBMITS:
        answers |= one.run([message])
    return answers


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16, "num_blocks": 40},
    ],
    ids=["all at once", "chunks of 7", "too few blocks"],
)
def test_answers_are_those_given_alone(
    tiny_models: Path, kernel_cache: Path, alone: dict[int, Answer], values: dict[str, int]
) -> None:
    together = loop(tiny_models, kernel_cache, max_model_len=400, **values)
    for _ in range(2):  # the second time many prompts are in the prefix cache
        same(together.run(SUBMITS), alone)


def test_answers_without_graphs_of_chunks_are_those_given_alone(
    tiny_models: Path, kernel_cache: Path, alone: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts together are 985 tokens, which graphs reach."""
    monkeypatch.setattr(gpu_inputs, "chunk_layouts", lambda *sizes: [])
    values = {"max_num_batched_tokens": 2000, "max_num_seqs": 16}
    test_answers_are_those_given_alone(tiny_models, kernel_cache, alone, values)


@pytest.mark.parametrize(
    ("tokens", "graphs"),
    [(2000, True), (64, True), (2000, False)],
    ids=["whole prompts", "chunks of 64", "whole prompts without graphs of chunks"],
)
def test_prompt_logprobs_equal_transformers(
    tiny_models: Path,
    kernel_cache: Path,
    golden: dict[str, dict[str, list[list[float]]]],
    tokens: int,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not graphs:
        monkeypatch.setattr(gpu_inputs, "chunk_layouts", lambda *sizes: [])
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=5)
    scored = [dataclasses.replace(message, sampling=sampling, prompt_logprobs_from=0) for message in SUBMITS]
    sizes = {"max_model_len": 400, "max_num_batched_tokens": tokens, "max_num_seqs": 16}
    found = loop(tiny_models, kernel_cache, **sizes).run(scored)
    for number, expected in enumerate(golden["llama_bias"]["prompt_logprobs"]):
        rows = found[number].prompt_logprobs
        assert [row[0] for row in rows] == pytest.approx(expected, abs=1e-4)
        for token, (own, rank, top_ids, top) in zip(prompt(number)[1:], rows, strict=True):
            assert list(top) == sorted(top, reverse=True)
            assert (top_ids[rank - 1], top[rank - 1]) == (token, own) if rank <= 5 else own <= top[-1]
