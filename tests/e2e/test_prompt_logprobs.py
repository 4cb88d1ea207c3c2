"""Scored prompts over HTTP are those of transformers, and the same bits in every composition. Case C6."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.api import Api
from tests.e2e.test_exact import EVERY_PROMPT
from tests.engine.tiny_models import PROMPT_LENGTHS, prompt

PATH = "/v1/completions"


def scored(number: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt(number), "max_tokens": 0, "echo": True, "logprobs": 3, "temperature": 0, **more}


def test_c6_echo_with_logprobs_again_and_again(start_pair: Callable, golden: dict) -> None:
    """In chunks of 7, prompts of 1 to 300 tokens with block - 1, block, block + 1 and 2 blocks + 1 among them; the
    second time all of it is cached."""
    api, _ = start_pair("llama_bias", "--max-num-batched-tokens=7", "--max-num-seqs=7")
    api.answers(PATH, [{"prompt": prompt(number), "max_tokens": 1} for number in EVERY_PROMPT])
    first = [answer.choices[0].logprobs for answer in api.answers(PATH, [scored(number) for number in EVERY_PROMPT])]
    for number in (2, 3, 4, 13, 9):
        assert api.post(PATH, scored(number)).json()["choices"][0]["logprobs"] == first[number]
    for logprobs, expected, length in zip(first, golden["llama_bias"]["prompt_logprobs"], PROMPT_LENGTHS, strict=True):
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == length
    _assert_a_list_is_scored_as_each_alone(api)


def _assert_a_list_is_scored_as_each_alone(api: Api) -> None:
    prompts = [prompt(number) for number in EVERY_PROMPT]
    fields = {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 2, "logprobs": 1, "echo": True}
    together = api.post(PATH, {"prompt": prompts, **fields}).json()["choices"]
    for number in (0, 1, 4, 9, 15):
        (alone,) = api.post(PATH, {"prompt": prompts[number], **fields}).json()["choices"]
        assert alone == together[number] | {"index": 0}
        own = [next(iter(entries.values()))["logprob"] for entries in alone["prompt_logprobs"][1:]]
        assert own == alone["logprobs"]["token_logprobs"][1 : len(own) + 1]
