"""Sampling rules: ranges, error texts, seeds and noise against published and stored vectors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from protocol.sampling import (
    LARGEST_UNIFORM,
    SamplingError,
    SamplingParams,
    choice_seed,
    gumbel,
    noise_word,
    philox4x32,
    shown,
    splitmix64,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "noise.json"


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_splitmix64_gives_its_published_first_output():
    assert splitmix64(1234567) == 6457827717110365317


def test_noise_words_equal_the_golden_table():
    rows = json.loads(GOLDEN.read_text())["rows"]
    assert len(rows) >= 30
    for row in rows:
        seed = choice_seed(row["seed"], row["j"])
        assert seed == row["choice_seed"]
        assert noise_word(seed, row["position"], row["token"]) == row["word"]


def test_the_largest_word_gives_finite_noise():
    assert LARGEST_UNIFORM < 1.0
    assert gumbel(0xFFFFFFFF) == pytest.approx(-math.log(-math.log(1 - 2.0**-24)))
    assert gumbel(0) == pytest.approx(-math.log(-math.log(2.0**-25)))


def test_choices_of_one_prompt_have_distinct_seeds():
    assert len({choice_seed(42, j) for j in range(128)}) == 128
    assert all(-(2**63) <= choice_seed(seed, 3) < 2**63 for seed in (-(2**63), -1, 0, 2**63 - 1))


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"temperature": 2.5}, "temperature", "at least 0 and at most 2, got 2.5"),
        ({"temperature": math.nan}, "temperature", "got nan"),
        ({"temperature": "1"}, "temperature", "must be a number, got '1'"),
        ({"temperature": True}, "temperature", "must be a number, got True"),
        ({"top_p": 0.0}, "top_p", "above 0 and at most 1, got 0.0"),
        ({"top_p": math.inf}, "top_p", "got inf"),
        ({"min_p": -0.1}, "min_p", "at least 0"),
        ({"top_k": -2}, "top_k", "between -1 and"),
        ({"top_k": 1.0}, "top_k", "must be an integer, got 1.0"),
        ({"presence_penalty": -2.1}, "presence_penalty", "at least -2"),
        ({"frequency_penalty": 3}, "frequency_penalty", "at most 2, got 3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
        ({"max_tokens": -1}, "max_tokens", "between 0 and"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "at most max_tokens (10), got 20"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false, got 1"),
        ({"stop_token_ids": (100,)}, "stop_token_ids", "token id 100 is outside the vocabulary of 100"),
        ({"stop_token_ids": 5}, "stop_token_ids", "must be a list of token ids, got 5"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "got -1"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids", "at most 64 token ids, got 65"),
        ({"allowed_token_ids": (500,)}, "allowed_token_ids", "token id 500"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias", "at most 100, got 101.0"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias", "token id 100"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20, got 21"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "must be an integer, got True"),
        ({"bad_words": ((1,), (2, 100))}, "bad_words", "token id 100 is outside the vocabulary of 100"),
        ({"bad_words": ((),)}, "bad_words", "must not hold an empty list"),
        ({"bad_words": (7,)}, "bad_words", "must be a list of token ids, got 7"),
        ({"bad_words": ((1,),) * 513}, "bad_words", "at most 512 lists"),
        ({"bad_words": ((1,) * 65,)}, "bad_words", "at most 64 token ids, got 65"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_limit_and_value(change, field, words):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**change).validate(vocab_size=100)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_both_spellings_of_no_top_k_limit_are_valid():
    for top_k in (0, -1):
        SamplingParams(top_k=top_k).validate()
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_an_error_text_is_bounded_and_encodable():
    assert len(shown("x" * 1000)) == 80
    assert shown("\ud83d") == r"'\ud83d'"


def test_values_are_shown_without_looking_at_all_of_them() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[[[...]]]]]"
    assert shown(list(range(10**6))).endswith("14, 15, ...]")
    assert len(shown({"a" * 10**6: "b" * 10**6})) == 80
