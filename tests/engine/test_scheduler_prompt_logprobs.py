"""Logprobs of prompts under the scheduler: each position once and in order, whatever happens on the way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from protocol.messages import ErrorCode, Failure, Finished, FinishReason, u32
from tests.engine.control import OWNER, Driver, Heard, alone, fake_prompt_logprobs, submit

DEPTHS = pytest.mark.parametrize("depth", [1, 2])

PROMPT = b"the prompt that is scored, of four blocks of sixteen ids and more"


def test_they_do_not_read_the_cache_but_fill_it():
    driver = Driver()
    cached = []
    for handle, first in enumerate([0, 0, -1]):
        heard = driver.add(submit(handle, PROMPT, max_tokens=1, prompt_logprobs_from=first))
        driver.run()
        cached.append(heard.entered[0].message.cached_tokens)
    assert cached == [0, 0, 64]


@DEPTHS
@pytest.mark.parametrize(
    "values",
    [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}, {"enable_prefix_caching": False}, {"block_size": 48}],
)
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_each_comes_once_and_before_the_first_token(depth, values, max_tokens):
    driver = Driver(fake_depth=depth, **values)
    message = submit(1, PROMPT, max_tokens=max_tokens, prompt_logprobs=2, prompt_logprobs_from=0)
    others = [driver.add(submit(i, PROMPT[i:], max_tokens=5)) for i in (2, 3)]
    heard = driver.add(message)
    driver.run()
    assert heard.prompt_logprobs == fake_prompt_logprobs(PROMPT)
    assert u32(heard.tokens) == alone(replace(message, prompt_logprobs_from=-1))
    assert heard.finished == [Finished(1, FinishReason.LENGTH, len(PROMPT), 0, max_tokens)]
    assert [len(other.tokens) for other in others] == [5, 5]


@DEPTHS
def test_preempted_requests_get_each_once(depth):
    driver = Driver(fake_depth=depth, fake_num_blocks=20, max_num_seqs=8, max_num_batched_tokens=11)
    prompts = [b"prompt %d " % i * 4 for i in range(8)]
    heard = [driver.add(submit(i, prompt, max_tokens=40, prompt_logprobs_from=0)) for i, prompt in enumerate(prompts)]
    driver.run()
    assert driver.scheduler.counts.preemptions > 0
    assert [h.prompt_logprobs for h in heard] == [fake_prompt_logprobs(prompt) for prompt in prompts]


@DEPTHS
@pytest.mark.parametrize("first", [1, 2, 30, 33, len(PROMPT) - 1, len(PROMPT), 999])
def test_they_go_on_where_another_life_ended(depth, first):
    """The rest hangs on the hidden states from one position before; what is cached before that is read."""
    driver = Driver(fake_depth=depth)
    driver.add(submit(1, PROMPT, max_tokens=1))
    driver.run()
    heard = driver.add(submit(2, PROMPT, max_tokens=0, prompt_logprobs_from=first, resume=True))
    driver.run()
    assert heard.prompt_logprobs == fake_prompt_logprobs(PROMPT, first)
    num_cached = (first - 1) // 16 * 16 if first < len(PROMPT) else 0
    assert heard.finished == [Finished(2, FinishReason.LENGTH, len(PROMPT), num_cached, 0)]


def test_a_resumed_choice_that_is_complete_still_gets_them():
    driver = Driver()
    tokens = alone(submit(1, PROMPT, max_tokens=9))
    driver.scheduler.add(OWNER, submit(1, PROMPT, max_tokens=9, generated_ids=tokens, prompt_logprobs_from=0), 0.0)
    heard = driver.heard[OWNER, 1] = Heard()
    driver.run()
    assert heard.prompt_logprobs == fake_prompt_logprobs(PROMPT)
    assert (heard.tokens, heard.finished) == ([], [Finished(1, FinishReason.LENGTH, len(PROMPT), 0, 9)])


def test_a_prompt_that_fills_the_pool_is_scored():
    """It has one position more than the pool holds: the last token's hidden state is not needed."""
    driver = Driver(fake_num_blocks=4)
    heard = driver.add(submit(1, PROMPT, max_tokens=0, prompt_logprobs_from=0))
    assert len(PROMPT) == 4 * 16 + 1
    driver.run()
    assert heard.prompt_logprobs == fake_prompt_logprobs(PROMPT)


def test_a_prompt_of_one_token_has_none():
    driver = Driver()
    heard = driver.add(submit(1, b"a", max_tokens=0, prompt_logprobs_from=0))
    assert heard.finished == [Finished(1, FinishReason.LENGTH, 1, 0, 0)]
    assert not driver.scheduler.has_requests


def test_what_is_no_number_ends_the_request_with_an_error():
    driver = Driver()
    heard = driver.add(submit(1, PROMPT, max_tokens=3, prompt_logprobs_from=0))
    plan = driver.scheduler.schedule(0.0)
    driver.runner.launch(plan)
    result = driver.runner.collect()
    result.scored.own[40] = math.nan
    driver.hear(driver.scheduler.commit(plan, result), result)
    driver.scheduler.check()
    assert (heard.prompt_logprobs, heard.tokens) == ({}, [])
    assert heard.finished[0].error == Failure(ErrorCode.INTERNAL, "the model's logits were not finite")


def test_a_backend_without_them_refuses_them_and_goes_on():
    driver = Driver()
    heard = driver.add(submit(1, PROMPT, max_tokens=3, prompt_logprobs_from=0))
    other = driver.add(submit(2, PROMPT, max_tokens=3))
    plan = driver.scheduler.schedule(0.0)
    driver.runner.launch(plan)
    driver.hear(driver.scheduler.commit(plan, replace(driver.runner.collect(), scored=None)))
    driver.run()
    assert heard.finished[0].error.code is ErrorCode.BAD_REQUEST
    assert len(other.tokens) == 3
