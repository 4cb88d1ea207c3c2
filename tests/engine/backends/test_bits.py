"""Random requests of mixed lengths and parameters: no composition of steps changes a bit of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.messages import Submit
from tests.engine.core_loop import Answer, Loop, same
from tests.engine.random_requests import random_request
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.timeout(600)

MODEL, CONTEXT = "llama_head_dim", 400
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 130, 257, 300)

#: Whole prompts fit a step, so that as many run together as there are places.
WHOLE = {"max_num_batched_tokens": 4096}
COMPOSITIONS: dict[str, dict[str, int]] = {
    "3 at a time": WHOLE | {"max_num_seqs": 3},
    "17 at a time": WHOLE | {"max_num_seqs": 17},
    "60 at a time": WHOLE | {"max_num_seqs": 60},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 60},
    "preempted": {"max_num_batched_tokens": 256, "max_num_seqs": 60, "num_blocks": 27},
    "2 threads": WHOLE | {"max_num_seqs": 17, "threads": 2},
    "two steps in flight": WHOLE | {"max_num_seqs": 17, "depth": 2},
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=[40, pytest.param(200, marks=pytest.mark.slow)])
def requests(request: pytest.FixtureRequest) -> list[Submit]:
    return [
        random_request(number, vocab_size=VOCAB_SIZE, lengths=LENGTHS, max_tokens=48) for number in range(request.param)
    ]


@pytest.fixture(scope="module")
def alone(tiny_models: Path, requests: list[Submit], dtype: str) -> dict[int, Answer]:
    """Each by itself: whole prompt, nothing cached, nothing beside it."""
    loop = Loop(tiny_models / MODEL, dtype=dtype, max_model_len=CONTEXT, enable_prefix_caching=False, **WHOLE)
    answers: dict[int, Answer] = {}
    for message in requests:
        answers |= loop.run([message])
    return answers


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_no_composition_changes_a_bit(
    tiny_models: Path, requests: list[Submit], alone: dict[int, Answer], dtype: str, composition: str
) -> None:
    values = COMPOSITIONS[composition]
    loop = Loop(tiny_models / MODEL, dtype=dtype, max_model_len=CONTEXT, **values)
    same(loop.run(requests), alone)
    assert (loop.core.status.totals.preemptions > 0) == (composition == "preempted")


def test_cached_prefixes_change_no_bit(
    tiny_models: Path, requests: list[Submit], alone: dict[int, Answer], dtype: str
) -> None:
    loop = Loop(tiny_models / MODEL, dtype=dtype, max_model_len=CONTEXT, max_num_batched_tokens=256)
    loop.run(requests)
    again = loop.run(requests)
    same(again, alone)
    assert sum(answer.num_cached > 0 for answer in again.values()) > len(requests) // 3
