"""The torch runner under the real scheduler: chunks, prefix hits, preemption and overlap change no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from protocol.messages import Submit, u32
from protocol.sampling import SamplingParams
from tests.engine.core_loop import Answer, Loop, same
from tests.engine.tiny_models import PROMPT_LENGTHS, prompt

pytestmark = pytest.mark.timeout(300)

NUM_NEW = 72
NUM_TOP = 5


def submit(number: int) -> Submit:
    sampling = SamplingParams(
        max_tokens=NUM_NEW - number,
        temperature=(0.0, 0.9)[number % 2],
        frequency_penalty=(0.0, 0.3, 0.0)[number % 3],
        min_tokens=40 + number % 4,
        logprobs=2,
        prompt_logprobs=3 if number % 2 else None,
        bad_words=((60,), (61, 62)) if number % 4 == 3 else (),
    )
    return Submit(
        handle=number,
        request_id=f"r{number}",
        prompt_ids=u32(prompt(number)),
        sampling=sampling,
        seed=number,
        prompt_logprobs_from=1 if number % 2 else -1,
    )


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    return [submit(number) for number in range(len(PROMPT_LENGTHS))]


@pytest.fixture(scope="module")
def alone(tiny_models: Path, submits: list[Submit]) -> dict[int, Answer]:
    loop = Loop(tiny_models / "llama_head_dim", enable_prefix_caching=False, max_model_len=400, num_blocks=2000)
    answers: dict[int, Answer] = {}
    for message in submits:
        answers |= loop.run([message])
    return answers


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16, "num_blocks": 40},
    ],
    ids=["all at once", "chunks of 7", "too few blocks"],
)
def test_answers_equal_those_alone(
    tiny_models: Path, submits: list[Submit], alone: dict[int, Answer], depth: int, values: dict[str, int]
) -> None:
    loop = Loop(tiny_models / "llama_head_dim", depth=depth, max_model_len=400, **values)
    same(loop.run(submits), alone)
    assert (loop.core.status.totals.preemptions > 0) == ("num_blocks" in values)


def test_a_prefix_hit_changes_nothing(tiny_models: Path, submits: list[Submit], alone: dict[int, Answer]) -> None:
    loop = Loop(tiny_models / "llama_head_dim", max_model_len=400)
    same(loop.run(submits), alone)
    again = loop.run(submits)
    same(again, alone)
    assert {handle: answer.num_cached for handle, answer in again.items()} == {
        number: 0 if number % 2 else min(length // 16 * 16, length - 1) for number, length in enumerate(PROMPT_LENGTHS)
    }


def test_resumed_in_the_middle(tiny_models: Path, submits: list[Submit], alone: dict[int, Answer]) -> None:
    loop = Loop(tiny_models / "llama_head_dim", max_model_len=400)
    cut = [min(5, len(alone[message.handle].ids) - 1) for message in submits]
    rest = [
        dataclasses.replace(
            message, generated_ids=u32(alone[message.handle].ids[:at]), resume=True, prompt_logprobs_from=-1
        )
        for message, at in zip(submits, cut, strict=True)
    ]
    found = loop.run(rest)
    for message, at in zip(submits, cut, strict=True):
        assert found[message.handle].ids == alone[message.handle].ids[at:]
        assert found[message.handle].logprobs == alone[message.handle].logprobs[at:]


def test_prompt_logprobs_equal_transformers(tiny_models: Path, submits: list[Submit], golden: dict) -> None:
    """Scored alone (max_tokens 0), in slices of 64 rows: the log-softmax of transformers' float32 logits."""
    loop = Loop(tiny_models / "llama_head_dim", max_model_len=400)
    scored = [
        dataclasses.replace(
            message, sampling=SamplingParams(max_tokens=0, prompt_logprobs=NUM_TOP), prompt_logprobs_from=0
        )
        for message in submits
    ]
    found = loop.run(scored)
    for number, expected in enumerate(golden["llama_head_dim"]["prompt_logprobs"]):
        rows, ids = found[number].prompt_logprobs, prompt(number)
        assert [row[0] for row in rows] == pytest.approx(expected, abs=1e-4)
        for token, (own, rank, top_ids, top) in zip(ids[1:], rows, strict=True):
            assert list(top) == sorted(top, reverse=True)
            if rank <= NUM_TOP:
                assert (top_ids[rank - 1], top[rank - 1]) == (token, own)
            else:
                assert own <= top[-1]


@pytest.mark.parametrize("cut", [1, 2, 17, 40, 64])
def test_prompt_logprobs_go_on_after_a_kill(
    tiny_models: Path, submits: list[Submit], alone: dict[int, Answer], cut: int
) -> None:
    loop = Loop(tiny_models / "llama_head_dim", max_model_len=400)
    rest = [
        dataclasses.replace(message, prompt_logprobs_from=cut, resume=True)
        for message in submits
        if message.prompt_logprobs_from >= 0
    ]
    found = loop.run(rest)
    for message in rest:
        expected = alone[message.handle]
        answer = found[message.handle]
        assert (answer.ids, answer.logprobs) == (expected.ids, expected.logprobs)
        assert answer.prompt_logprobs == expected.prompt_logprobs[cut - 1 :]
