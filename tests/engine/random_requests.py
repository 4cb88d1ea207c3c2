"""Requests of mixed lengths and parameters, for tests that compare bits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from protocol.messages import Submit, u32
from protocol.sampling import SamplingParams

#: The shared beginning of every fourth prompt, for the prefix cache.
_SHARED = 48


def random_request(number: int, *, vocab_size: int, lengths: Sequence[int], max_tokens: int) -> Submit:
    """The same for the same number; a prompt has one of `lengths`, and 48 tokens more if it begins as others do."""
    rng = random.Random(number)
    ids = [rng.randrange(3, vocab_size) for _ in range(rng.choice(lengths))]
    if number % 4 == 0:
        ids = [3 + place % 90 for place in range(_SHARED)] + ids
    num_new = rng.randrange(1, max_tokens + 1)
    sampling = SamplingParams(
        max_tokens=num_new,
        min_tokens=rng.randrange(0, num_new + 1),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=rng.choice((0, 1, 5, 40)),
        top_p=rng.choice((1.0, 0.95, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        presence_penalty=rng.choice((0.0, 0.5, -0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((1, 2, 5)),
        prompt_logprobs=rng.choice((None, None, None, 2)),
        stop_token_ids=(rng.randrange(3, vocab_size),) if rng.random() < 0.2 else (),
        logit_bias=((rng.randrange(3, vocab_size), 3.0), (rng.randrange(3, vocab_size), -100.0)),
        allowed_token_ids=tuple(range(3, 60)) if rng.random() < 0.2 else (),
        bad_words=((rng.randrange(3, 60), rng.randrange(3, 60)),) if rng.random() < 0.3 else (),
    )
    return Submit(
        handle=number,
        request_id=f"random-{number}",
        prompt_ids=u32(ids),
        sampling=sampling,
        seed=number,
        prompt_logprobs_from=-1 if sampling.prompt_logprobs is None else 1,
    )
