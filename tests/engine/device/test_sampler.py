"""Each rule of `protocol.sampling` against an independent float64 reading of that page."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.device.sampler import Sampled, Sampler
from engine.plan import SlotState
from protocol.messages import U32
from protocol.sampling import GREEDY_BELOW, SamplingParams, gumbel, noise_word

VOCAB_SIZE = 97
ENDS = (2, 5)


def expected_id(logits: npt.NDArray[np.float64], state: SlotState, position: int) -> int:
    """The token by the eight steps of the page, one after the other, in float64."""
    x, p = logits.copy(), state.sampling
    for token, bias in p.logit_bias:
        x[token] += bias
    if p.allowed_token_ids:
        x[[token for token in range(VOCAB_SIZE) if token not in p.allowed_token_ids]] = -np.inf
    generated = list(state.generated_ids)
    for *begin, last in p.bad_words:
        if generated[len(generated) - len(begin) :] == begin:
            x[last] = -np.inf
    for token in set(state.prompt_ids) | set(generated):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(generated):
        x[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    if len(generated) < p.min_tokens:
        x[list(state.masked_until_min)] = -np.inf
    if p.temperature < GREEDY_BELOW:
        return int(np.argmax(x))
    x = x / p.temperature
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-x[token], token))
    if p.top_k > 0:
        x[order[p.top_k :]] = -np.inf
    weights = np.exp(x - x.max())
    total, running, kept = weights.sum(), 0.0, set()
    for token in order:
        if running >= p.top_p * total:
            break
        kept.add(token)
        running += weights[token]
    kept = {token for token in kept if weights[token] >= p.min_p}
    noisy = [
        x[token] + gumbel(noise_word(state.seed, position, token)) if token in kept else -np.inf
        for token in range(VOCAB_SIZE)
    ]
    return int(np.argmax(noisy))


def state(slot: int, sampling: SamplingParams, prompt: list[int], generated: list[int], seed: int = 5) -> SlotState:
    return SlotState(slot, array(U32, prompt), array(U32, generated), sampling, seed, masked_until_min=ENDS)


def sample(states: list[SlotState], logits: npt.NDArray[np.float32], sampler: Sampler | None = None) -> Sampled:
    sampler = sampler or Sampler(len(states))
    for one in states:
        sampler.enter(one)
    positions = np.array([len(one.prompt_ids) + len(one.generated_ids) for one in states], np.int64)
    return sampler.sample(torch.from_numpy(logits.copy()), np.array([one.slot for one in states], np.int64), positions)


def random_logits(rows: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB_SIZE)).astype(np.float32)


RULES = {
    "plain": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 4},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p_1": {"min_p": 1.0},
    "all_filters": {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    "bias": {"logit_bias": ((7, 30.0), (8, 30.5), (9, -100.0))},
    "allowed": {"allowed_token_ids": (3, 96, 50, 2)},
    "bad_words": {"bad_words": ((7,), (11, 12), (40, 41, 42)), "logit_bias": ((7, 30.0), (12, 25.0), (42, 20.0))},
    "repetition": {"repetition_penalty": 2.0, "temperature": 0.0},
    "repetition_below_1": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "presence_negative": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.5},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "min_tokens": {"min_tokens": 30, "logit_bias": ((2, 100.0), (5, 100.0))},
    "min_tokens_reached": {"min_tokens": 6, "logit_bias": ((2, 100.0),)},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((1, 2.0), (3, -1.0)),
        "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
        "min_tokens": 8,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    sampling = SamplingParams(max_tokens=64, **RULES[name])
    rows = 48
    logits = random_logits(rows)
    random = np.random.default_rng(1)
    states = [
        state(
            row,
            sampling,
            random.integers(0, VOCAB_SIZE, 20).tolist(),
            [*random.integers(0, VOCAB_SIZE, 6).tolist(), 11, 11],
            seed=int(random.integers(-(2**63), 2**63)),
        )
        for row in range(rows)
    ]
    expected = [expected_id(logits[row].astype(np.float64), states[row], 28) for row in range(rows)]
    assert sample(states, logits).ids.tolist() == expected


def test_rules_do_not_leak_into_neighbours() -> None:
    """Rows of every rule in one batch get what each gets alone."""
    logits = random_logits(len(RULES), seed=3)
    states = [
        state(row, SamplingParams(max_tokens=64, **rule), [1, 2, 3, row], [4, 5, row, 4], seed=row)
        for row, rule in enumerate(RULES.values())
    ]
    together = sample(states, logits)
    alone = [
        sample([state(0, one.sampling, list(one.prompt_ids), list(one.generated_ids), one.seed)], logits[[row]])
        for row, one in enumerate(states)
    ]
    assert together.ids.tolist() == [int(one.ids[0]) for one in alone]


def test_penalties_count_what_is_sampled() -> None:
    """Ids the device sampled count at once: the host may not have read them yet."""
    sampling = SamplingParams(max_tokens=64, temperature=0.0, presence_penalty=2.0)
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, [10, 20, 30]] = 3.0, 2.5, 2.0
    sampler = Sampler(1)
    sampler.enter(state(0, sampling, [10, 10, 10], []))
    ids = [
        int(sampler.sample(torch.from_numpy(logits.copy()), np.array([0]), np.array([position])).ids[0])
        for position in range(3, 8)
    ]
    assert ids == [10, 20, 30, 10, 10]


def test_repetition_counts_prompt_and_presence_does_not() -> None:
    """A prompt full of one word: presence leaves the first step as it is, repetition divides or multiplies."""
    logits = np.full((1, VOCAB_SIZE), -9.0, np.float32)
    logits[0, [7, 8]] = 4.0, 3.0
    prompt = [7] * 20

    def first(**rule: float) -> int:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, **rule)
        return int(sample([state(0, sampling, prompt, [])], logits).ids[0])

    assert (first(), first(presence_penalty=2.0), first(frequency_penalty=2.0)) == (7, 7, 7)
    assert first(repetition_penalty=2.0) == 8  # 4 / 2 < 3
    logits -= 8.0
    assert first(repetition_penalty=2.0) == 8  # -4 * 2 < -5


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_without_limit(top_k: int) -> None:
    logits = random_logits(20)
    plain = [state(row, SamplingParams(), [1], [], seed=row) for row in range(20)]
    unlimited = [state(row, SamplingParams(top_k=top_k), [1], [], seed=row) for row in range(20)]
    ids = sample(plain, logits).ids.tolist()
    assert sample(unlimited, logits).ids.tolist() == ids
    assert len(set(ids)) > 5


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 0.0])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(20) * 10
    states = [state(row, SamplingParams(temperature=temperature), [1], [], seed=row) for row in range(20)]
    sampled = sample(states, logits)
    assert sampled.ids.tolist() == logits.argmax(axis=1).tolist()
    assert sampled.failed == ()


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((1, VOCAB_SIZE), np.float32)
    logits[0, [40, 60, 80]] = 1.0
    assert sample([state(0, SamplingParams(temperature=0.0), [1], [])], logits).ids.tolist() == [40]
    seen = {
        int(sample([state(0, SamplingParams(top_k=2, temperature=0.1), [1], [], seed)], logits).ids[0])
        for seed in range(40)
    }
    assert seen == {40, 60}


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3, seed=9)
    rules = [
        SamplingParams(temperature=0.0, logprobs=2, logit_bias=((13, 100.0),)),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, logprobs=5, top_k=3),
    ]
    sampled = sample([state(row, rule, [1], []) for row, rule in enumerate(rules)], logits)
    found = sampled.logprobs
    assert found is not None
    assert found.k == 5
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    ids = sampled.ids.tolist()
    assert ids[0] == 13
    for row, k in ((0, 2), (2, 5)):
        order = np.argsort(-expected[row], kind="stable")
        assert list(found.top_ids[row * 5 : row * 5 + k]) == order[:k].tolist()
        np.testing.assert_allclose(found.top[row * 5 : row * 5 + k], expected[row][order[:k]], atol=1e-5)
        np.testing.assert_allclose(found.own[row], expected[row][ids[row]], atol=1e-5)
        assert found.rank[row] == order.tolist().index(ids[row]) + 1
    assert found.own[1] == 0.0
    assert (found.rank.typecode, found.top_ids.typecode, found.top.typecode) == ("I", "I", "f")


def test_logprobs_0_is_the_chosen_token_only() -> None:
    sampled = sample([state(0, SamplingParams(logprobs=0), [1], [])], random_logits(1))
    assert sampled.logprobs is not None
    assert (sampled.logprobs.k, len(sampled.logprobs.own), len(sampled.logprobs.top)) == (0, 1, 0)


def test_nobody_asks_for_logprobs() -> None:
    assert sample([state(0, SamplingParams(), [1], [])], random_logits(1)).logprobs is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_fail_their_row_only(value: float) -> None:
    logits = random_logits(3)
    logits[1, 50] = value
    states = [state(row, SamplingParams(temperature=0.0, logprobs=1), [1], []) for row in range(3)]
    sampled = sample(states, logits)
    assert sampled.failed == ((1, "the model's logits were not finite"),)
    assert sampled.ids.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]


def test_a_slot_forgets_its_last_request() -> None:
    sampler = Sampler(1)
    logits = random_logits(1)
    old = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), repetition_penalty=2.0, min_tokens=9, max_tokens=9)
    assert sample([state(0, old, [1], [])], logits, sampler).ids.tolist() == [3]
    new = [state(0, SamplingParams(temperature=0.0), [1], [])]
    assert sample(new, logits, sampler).ids.tolist() == logits.argmax(axis=1).tolist()
