"""The torch runner under the real scheduler: chunks, prefix hits, preemption and overlap change no bit."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.backends.torch_runner import TorchRunner
from engine.config import EngineConfig, resolve
from engine.core import EngineCore
from engine.events import Delivery
from engine.inbox import Inbox, Submitted
from engine.metrics import EngineMetrics
from protocol.messages import Admitted, Finished, Logprobs, PromptLogprobs, Step, Submit, u32
from protocol.sampling import SamplingParams
from tests.engine.tiny_models import PROMPT_LENGTHS, prompt
from tests.engine.torch_runners import no_progress

pytestmark = pytest.mark.timeout(300)

NUM_NEW = 72
NUM_TOP = 5


#: A token's own logprob and rank, and its alternatives' ids and logprobs.
Row = tuple[float, int, tuple[int, ...], tuple[float, ...]]


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[Row] = field(default_factory=list)
    prompt_logprobs: list[Row] = field(default_factory=list)
    reason: str = ""
    num_cached: int = 0


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


class Loop:
    """An EngineCore over the model at `folder`, without threads or sockets."""

    def __init__(self, folder: Path, *, depth: int = 1, num_blocks: int = 2000, **values: object) -> None:
        block_bytes = (
            3 * 2 * (20 + 32) * 16 * 4
        )  # layers, heads, head_dim of keys and (padded) values, positions, float32
        settings = {
            "model": str(folder),
            "device": "cpu",
            "threads": 1,
            "kv_cache_memory_bytes": num_blocks * block_bytes,
        }
        config = EngineConfig.model_validate(settings | values)
        runner = TorchRunner(config)
        runner.max_in_flight = depth
        resolved = resolve(config, runner.load(no_progress))
        assert resolved.info.num_blocks == num_blocks
        self._delivered: list[Delivery] = []
        self._inbox = Inbox()
        self.core = EngineCore(resolved, runner, self._inbox, self._delivered.extend, EngineMetrics(resolved))

    def run(self, submits: list[Submit]) -> dict[int, Answer]:
        for message in submits:
            self._inbox.put(Submitted(1, message))
        while self.core.step():
            self.core.scheduler.check()
        answers: dict[int, Answer] = defaultdict(Answer)
        for _, message in self._delivered:
            match message:
                case Admitted():
                    answers[message.handle].num_cached = message.cached_tokens
                case PromptLogprobs():
                    answer = answers[message.handle]
                    assert not answer.ids
                    answer.prompt_logprobs += _rows(message.logprobs)
                case Step():
                    _read(message, answers)
                case Finished():
                    answers[message.handle].reason = message.reason
        self._delivered.clear()
        return answers


def _read(step: Step, answers: dict[int, Answer]) -> None:
    assert step.logprobs is not None
    for handle, token, row in zip(step.handles, step.ids, _rows(step.logprobs), strict=True):
        answers[handle].ids.append(token)
        answers[handle].logprobs.append(row)


def _rows(columns: Logprobs) -> list[Row]:
    def row(number: int) -> Row:
        top = slice(number * columns.k, (number + 1) * columns.k)
        return columns.own[number], columns.rank[number], tuple(columns.top_ids[top]), tuple(columns.top[top])

    return [row(number) for number in range(len(columns.own))]


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


def same(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    for handle, answer in expected.items():
        assert dataclasses.replace(found[handle], num_cached=0) == answer


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
        number: 0 if number % 2 else (length - 1) // 16 * 16 for number, length in enumerate(PROMPT_LENGTHS)
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
