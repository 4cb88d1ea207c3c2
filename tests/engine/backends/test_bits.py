"""Random requests of mixed lengths and parameters: no composition of steps changes a bit of an answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from protocol.messages import Submit, u32
from protocol.sampling import SamplingParams
from tests.engine.core_loop import Answer, Loop, same
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.timeout(600)

MODEL, CONTEXT = "llama_head_dim", 400

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


def _request(number: int) -> Submit:
    """The same for the same number. Some prompts begin alike, for the prefix cache."""
    rng = random.Random(number)
    ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 63, 64, 65, 130, 257, 300)))]
    if number % 4 == 0:
        ids = [3 + place % 90 for place in range(48)] + ids
    max_tokens = rng.randrange(1, 49)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=rng.choice((0, 1, 5, 40)),
        top_p=rng.choice((1.0, 0.95, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        presence_penalty=rng.choice((0.0, 0.5, -0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((1, 2, 5)),
        prompt_logprobs=rng.choice((None, None, None, 2)),
        stop_token_ids=(rng.randrange(3, VOCAB_SIZE),) if rng.random() < 0.2 else (),
        logit_bias=((rng.randrange(3, VOCAB_SIZE), 3.0), (rng.randrange(3, VOCAB_SIZE), -100.0)),
        allowed_token_ids=tuple(range(3, 60)) if rng.random() < 0.2 else (),
        bad_words=((rng.randrange(3, 60), rng.randrange(3, 60)),) if rng.random() < 0.3 else (),
    )
    return Submit(
        handle=number,
        request_id=f"random-{number}",
        prompt_ids=u32(ids),
        sampling=sampling,
        seed=number,
        prompt_logprobs_from=-1 if sampling.prompt_logprobs is None else 1,
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=[40, pytest.param(200, marks=pytest.mark.slow)])
def requests(request: pytest.FixtureRequest) -> list[Submit]:
    return [_request(number) for number in range(request.param)]


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
