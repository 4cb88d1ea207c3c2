"""Sampling fields as a client sees them, on a model whose tokens are characters. Cases D of the list of faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.api import Api
from tests.engine.tiny_models import prompt

PATH = "/v1/completions"


@pytest.fixture
def api(start_pair: Callable) -> Api:
    return start_pair("llama_untied")[0]


def texts(api: Api, *bodies: dict[str, Any]) -> list[str]:
    shared = {"prompt": prompt(5), "max_tokens": 12, "ignore_eos": True, "min_tokens": 12}
    return [answer.choices[0].text for answer in api.answers(PATH, [shared | body for body in bodies])]


def test_sampling_fields(api: Api) -> None:
    """One server for all of them."""
    _d1_a_seed_gives_the_same_beside_others(api)
    _d3_a_bias_of_a_word_is_refused(api)
    _d4_top_k_0_and_minus_1_are_no_limit(api)
    _d5_a_tiny_temperature_is_greedy(api)
    _bad_words_never_come(api)
    _only_allowed_ids_come(api)
    _d6_at_least_min_tokens(api)


def _d1_a_seed_gives_the_same_beside_others(api: Api) -> None:
    seeded = {"temperature": 0.8, "seed": 42}
    (alone,) = texts(api, seeded)
    for num_others in (0, 1, 8, 1, 8, 0, 8, 1, 8, 8):
        assert texts(api, seeded, *[{"temperature": 0.8}] * num_others)[0] == alone


def _d3_a_bias_of_a_word_is_refused(api: Api) -> None:
    answer = api.post(PATH, {"prompt": "a", "logit_bias": {"AI": -100}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
    assert len(texts(api, {})) == 1


def _d4_top_k_0_and_minus_1_are_no_limit(api: Api) -> None:
    seeds = [{"temperature": 1, "seed": seed} for seed in range(20)]
    without = texts(api, *seeds)
    for top_k in (0, -1):
        assert texts(api, *[body | {"top_k": top_k} for body in seeds]) == without
    assert len(set(without)) > 10


def _d5_a_tiny_temperature_is_greedy(api: Api) -> None:
    greedy, *tiny = texts(api, {"temperature": 0}, {"temperature": 1e-4}, {"temperature": 1e-6})
    assert tiny == [greedy, greedy]
    assert len(greedy) == 12


def _bad_words_never_come(api: Api) -> None:
    (greedy,) = texts(api, {"temperature": 0})
    (without,) = texts(api, {"temperature": 0, "bad_words": [greedy[0]]})
    assert greedy[0] not in without
    (without,) = texts(api, {"temperature": 0, "bad_words": [greedy[2:5]]})
    assert without[:4] == greedy[:4]
    assert without[4] != greedy[4]


def _only_allowed_ids_come(api: Api) -> None:
    allowed = [40, 41, 42]
    body = {"prompt": prompt(5), "temperature": 1, "seed": 1, "max_tokens": 30, "return_token_ids": True}
    ids = api.post(PATH, body | {"allowed_token_ids": allowed}).json()["choices"][0]["token_ids"]
    assert set(ids) == set(allowed)


def _d6_at_least_min_tokens(api: Api) -> None:
    body = {"prompt": prompt(5), "temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    whole = api.post(PATH, body).json()["choices"][0]["text"]
    stop = whole[1]
    answer = api.post(PATH, body | {"min_tokens": 20, "stop": stop}).json()["choices"][0]
    end = whole.find(stop, 20)
    assert len(answer["token_ids"]) == (60 if end < 0 else end + 1) >= 20
    assert answer["text"] == (whole if end < 0 else whole[:end])
