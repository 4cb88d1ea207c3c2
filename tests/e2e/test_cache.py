"""Prefix cache and preemption as clients see them. Cases J of the list of faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.api import Api, assert_identical
from tests.e2e.test_exact import BLOCK_BYTES
from tests.engine.tiny_models import prompt
from tests.processes import free_port

PATH = "/v1/completions"


def test_j2_salts_do_not_share(start_pair: Callable) -> None:
    api, _ = start_pair("llama_untied")
    body = {"prompt": prompt(9), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answers = [api.answer(PATH, body | {"cache_salt": salt}) for salt in ("a", "a", "b")]
    cached = [(answer.usage or {})["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 256, 0]
    assert_identical(answers[0], answers[1])
    assert_identical(answers[0], answers[2])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "presence_penalty": 1.0},
        {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 100, "logprobs": 2},
    ],
    ids=["presence", "sampled"],
)
def test_j4_preempted_answers_are_those_of_each_alone(start_pair: Callable, fields: dict[str, object]) -> None:
    """KV for half of what eight long answers want."""
    port = free_port()
    api, _ = start_pair("llama_untied", f"--kv-cache-memory-bytes={48 * BLOCK_BYTES}", f"--metrics-port={port}")
    bodies: list[dict[str, object]] = [
        {"prompt": prompt(number), "max_tokens": 180, "ignore_eos": True, "return_token_ids": True, **fields}
        for number in (0, 1, 2, 3, 4, 11, 12, 15)
    ]
    together = api.answers(PATH, bodies)
    assert Api(f"http://127.0.0.1:{port}").metric("num_preemptions_total") > 0
    for body, answer in zip(bodies, together, strict=True):
        assert_identical(api.answer(PATH, body | {"cache_salt": "alone"}), answer)
