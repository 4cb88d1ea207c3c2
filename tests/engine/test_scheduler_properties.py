"""Whatever arrives in whatever order: one terminal event per Submit, no block lost, and the same
tokens as alone. The fake runner raises on every plan that a device could not run right."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import ErrorCode, FinishReason, Submit, u32
from tests.engine.control import Driver, Heard, alone, fake_prompt_logprobs, submit

NUM_BLOCKS = 8  # of 16 tokens: one request of the longest kind takes six
CONTEXT = 96
MEAN_LENGTH = 30

#: Prompts that share heads of several blocks, so that hits, ties and evictions are common.
PROMPTS = [b"a" * 40 + b"b" * 10, b"a" * 33, b"a" * 16, b"a" * 15, b"b" * 20, b"c", b"a" * 32 + b"c" * 40]

SUBMITS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS),
        "max_tokens": st.sampled_from([0, 1, 2, 5, 17, 40, 90]),
        "min_tokens": st.sampled_from([0, 0, 10]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (ord("q"),)]),
        "priority": st.sampled_from([0, 0, 0, -1, 5]),
        "salt": st.sampled_from(["", "", "tenant"]),
        "group": st.sampled_from([None, None, 1, 2]),
        "leader": st.booleans(),
        "resume_after": st.sampled_from([None, None, None, 1, 7, 100]),
        "prompt_logprobs_from": st.sampled_from([-1, -1, 0, 1, 17]),
        "deadline_ms": st.sampled_from([0, 0, 0, 0, 30]),
        "owner": st.integers(1, 3),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), SUBMITS),
        st.tuples(st.just("submit"), SUBMITS),
        st.tuples(st.just("turn"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("lose"), st.integers(1, 3)),
    ),
    max_size=40,
)
ENGINES = st.fixed_dictionaries(
    {
        "fake_depth": st.sampled_from([1, 2]),
        "max_num_batched_tokens": st.sampled_from([4, 7, 16, 64]),
        "max_num_prefill_tokens": st.sampled_from([None, 1, 5]),
        "max_num_seqs": st.sampled_from([1, 2, 4]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)


@lru_cache(maxsize=4096)
def _alone(prompt: bytes, **values: object) -> tuple[int, ...]:
    return tuple(alone(submit(0, prompt, **values), mean_length=MEAN_LENGTH))


def _message(handle: int, drawn: dict[str, object]) -> tuple[Submit, tuple[int, ...]]:
    values = {name: value for name, value in drawn.items() if name not in ("owner", "resume_after", "prompt")}
    prompt = drawn["prompt"]
    assert isinstance(prompt, bytes)
    values["max_tokens"] = min(values["max_tokens"], CONTEXT - len(prompt))
    values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])
    sampled = ("max_tokens", "min_tokens", "temperature", "seed", "ignore_eos", "stop_token_ids", "salt")
    expected = _alone(prompt, **{name: values[name] for name in sampled})
    if (resume_after := drawn["resume_after"]) is not None:
        # What was generated came after all logprobs of the prompt.
        values |= {"generated_ids": u32(expected[:resume_after]), "resume": True, "prompt_logprobs_from": -1}
    return submit(handle, prompt, **values), expected


def _check_end(heard: Heard, expected: tuple[int, ...], message: Submit) -> None:
    assert len(heard.finished) == 1
    finished = heard.finished[0]
    first = message.prompt_logprobs_from
    scored = fake_prompt_logprobs(bytes(message.prompt_ids.tolist()), first) if first >= 0 else {}
    assert heard.prompt_logprobs == dict(list(scored.items())[: len(heard.prompt_logprobs)])
    if heard.tokens or finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert len(heard.prompt_logprobs) == len(scored)
    assert finished.num_generated == len(heard.tokens)
    if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
        assert tuple(heard.tokens) == expected
        assert (finished.reason is FinishReason.STOP) == (finished.stop_id is not None)
    else:
        assert tuple(heard.tokens) == expected[: len(heard.tokens)]
    if finished.reason is FinishReason.ERROR:
        assert finished.error is not None
        assert finished.error.code is ErrorCode.DEADLINE
        assert message.deadline_ms


@settings(max_examples=150, deadline=None)
@given(engine=ENGINES, operations=OPERATIONS)
def test_one_end_per_submit_no_block_lost_and_the_tokens_of_a_lone_run(engine, operations):
    play(engine, operations)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_under_pressure(depth):
    """Forty requests at once, some aborted, in a pool that holds about two: preemption is the rule."""
    random = Random(depth)
    operations: list[tuple[str, object]] = []
    for number in range(40):
        drawn = {
            "prompt": random.choice(PROMPTS[1:6]),
            "max_tokens": random.choice([40, 90]),
            "min_tokens": 10,
            "temperature": random.choice([0.0, 1.0]),
            "seed": random.randrange(3),
            "ignore_eos": random.random() < 0.8,
            "stop_token_ids": (),
            "priority": random.choice([0, 0, -1, 5]),
            "salt": "",
            "group": random.choice([None, 1]),
            "leader": random.random() < 0.5,
            "resume_after": random.choice([None, None, 7]),
            "prompt_logprobs_from": 0 if number % 8 == 0 else -1,
            "deadline_ms": 0,
            "owner": random.randint(1, 3),
        }
        operations += [("submit", drawn), ("turn", random.randrange(20))]
        if random.random() < 0.2:
            operations.append(("abort", random.randrange(number + 1)))
    engine = {"fake_depth": depth, "max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": True}
    counts = play(engine, operations).scheduler.counts
    assert counts.preemptions >= 20
    assert counts.prefix_hits >= 80
    assert counts.aborted >= 3


def play(engine: dict[str, object], operations: list[tuple[str, object]]) -> Driver:
    """Carry out the operations, then run to the end; everything is checked on the way and at the end."""
    driver = Driver(fake_num_blocks=NUM_BLOCKS, max_model_len=CONTEXT, fake_mean_length=MEAN_LENGTH, **engine)
    everything: list[tuple[Heard, tuple[int, ...], Submit]] = []
    keys: list[tuple[int, int]] = []
    for operation, value in operations:
        match operation:
            case "submit":
                message, expected = _message(len(keys), value)
                keys.append((value["owner"], message.handle))
                everything.append((driver.add(message, value["owner"]), expected, message))
            case "turn":
                for _ in range(value):
                    driver.now += 0.005
                    driver.turn()
            case "abort" if keys:
                driver.scheduler.abort(*keys[value % len(keys)])
            case "lose":
                driver.scheduler.abort_owner(value)
        driver.hear(driver.scheduler.take_events())
        driver.scheduler.check()
    driver.run()
    for heard, expected, message in everything:
        _check_end(heard, expected, message)
    assert driver.scheduler.num_free_blocks == NUM_BLOCKS
    assert driver.scheduler.num_running == driver.scheduler.num_waiting == 0
    counts = driver.scheduler.counts
    assert counts.generated == sum(len(h.tokens) - len(m.generated_ids) for h, _, m in everything)
    return driver
