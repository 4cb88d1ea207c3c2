"""refusal: which Submits are refused, with which code and text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.admission import refusal
from engine.backends.fake_tokenizer import VOCAB_SIZE
from protocol.messages import ErrorCode, Grammar, Pooling, u32
from tests.engine.control import Driver, submit

RESOLVED = Driver(max_model_len=100, fake_num_blocks=5).resolved


@pytest.mark.parametrize(
    ("values", "code", "text"),
    [
        ({"grammar": Grammar("regex", "a*")}, ErrorCode.BAD_REQUEST, "This engine does not support grammar."),
        ({"adapter": "x"}, ErrorCode.BAD_REQUEST, "does not support adapter."),
        ({"pooling": Pooling.MEAN, "adapter": "x"}, ErrorCode.BAD_REQUEST, "does not support adapter, pooling."),
        ({"expect_digest": "abc"}, ErrorCode.DIGEST_MISMATCH, "expect_digest is abc; this engine's digest is "),
        ({"expect_numerics": "abc"}, ErrorCode.NUMERICS_MISMATCH, "expect_numerics is abc; this engine's numerics is "),
        (
            {"prompt": [VOCAB_SIZE]},
            ErrorCode.BAD_REQUEST,
            f"prompt_ids: token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}.",
        ),
        (
            {"generated_ids": u32([VOCAB_SIZE])},
            ErrorCode.BAD_REQUEST,
            f"generated_ids: token id {VOCAB_SIZE} is outside",
        ),
        ({"stop_token_ids": (300,)}, ErrorCode.BAD_REQUEST, "stop_token_ids: token id 300 is outside"),
        ({"logit_bias": ((300, 1.0),)}, ErrorCode.BAD_REQUEST, "logit_bias: token id 300 is outside"),
        ({"prompt": []}, ErrorCode.BAD_REQUEST, "prompt_ids must have at least 1 token, got 0."),
        (
            {"prompt": b"x" * 100},
            ErrorCode.TOO_LONG,
            "prompt_ids has 100 tokens; with one to generate the context of 100",
        ),
        ({"prompt": b"x" * 101, "max_tokens": 0}, ErrorCode.TOO_LONG, "prompt_ids has 101 tokens"),
        (
            {"generated_ids": u32([65] * 3), "max_tokens": 2},
            ErrorCode.BAD_REQUEST,
            "generated_ids has 3 tokens; max_tok",
        ),
        (
            {"prompt": b"x" * 50, "max_tokens": 32},
            ErrorCode.TOO_LONG,
            "need KV for 81 tokens; the pool holds 80 (--kv-",
        ),
    ],
)
def test_refused(values, code, text):
    failure = refusal(submit(1, **({"prompt": b"prompt", "max_tokens": 8} | values)), RESOLVED)
    assert failure is not None
    assert failure.code is code
    assert text in failure.text


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prompt": b"x" * 50, "max_tokens": 31},
        {"prompt": [VOCAB_SIZE - 1]},
        {"expect_digest": RESOLVED.info.digest, "expect_numerics": RESOLVED.info.numerics},
        {"generated_ids": u32([65] * 8), "resume": True},
        {"max_tokens": 0},
    ],
)
def test_accepted(values):
    assert refusal(submit(1, **({"prompt": b"prompt", "max_tokens": 8} | values)), RESOLVED) is None


def test_the_context_bounds_what_is_asked_for():
    roomy = Driver(max_model_len=100, fake_num_blocks=7).resolved
    assert refusal(submit(1, b"x" * 99, max_tokens=10_000), roomy) is None


def test_prompt_logprobs_of_a_backend_that_has_none() -> None:
    without = replace(RESOLVED, info=replace(RESOLVED.info, prompt_logprobs=False))
    asked = submit(1, b"prompt", prompt_logprobs_from=0)
    assert refusal(asked, RESOLVED) is None
    failure = refusal(asked, without)
    assert failure is not None
    assert (failure.code, failure.text) == (ErrorCode.BAD_REQUEST, "This engine does not support prompt_logprobs.")
    assert refusal(submit(1, b"prompt"), without) is None
