"""Which Submits an engine cannot serve at all, and what it says of them.

Pure functions of a decoded Submit and the resolved settings; credit is `engine.accounts`' affair.
"""

from __future__ import annotations

from array import array

import numpy as np

from engine.config import Resolved
from protocol.messages import ErrorCode, Failure, Pooling, Submit
from protocol.sampling import SamplingError


def refusal(submit: Submit, resolved: Resolved) -> Failure | None:
    """Why the engine refuses this Submit for good, None if it does not."""
    return (
        _unsupported(submit, resolved)
        or _other_model(submit, resolved)
        or _ids_outside(submit, resolved.info.vocab_size)
        or _too_long(submit, resolved)
    )


def _unsupported(submit: Submit, resolved: Resolved) -> Failure | None:
    names = []
    if submit.grammar is not None:
        names.append("grammar")
    if submit.adapter is not None:
        names.append("adapter")
    if submit.pooling is not Pooling.NONE:
        names.append("pooling")
    if submit.prompt_logprobs_from >= 0 and not resolved.info.prompt_logprobs:
        names.append("prompt_logprobs")
    return Failure(ErrorCode.BAD_REQUEST, f"This engine does not support {', '.join(names)}.") if names else None


def _other_model(submit: Submit, resolved: Resolved) -> Failure | None:
    info = resolved.info
    if submit.expect_digest not in ("", info.digest):
        text = f"expect_digest is {submit.expect_digest}; this engine's digest is {info.digest}."
        return Failure(ErrorCode.DIGEST_MISMATCH, text)
    if submit.expect_numerics not in ("", info.numerics):
        text = f"expect_numerics is {submit.expect_numerics}; this engine's numerics is {info.numerics}."
        return Failure(ErrorCode.NUMERICS_MISMATCH, text)
    return None


def _ids_outside(submit: Submit, vocab_size: int) -> Failure | None:
    for name, ids in (("prompt_ids", submit.prompt_ids), ("generated_ids", submit.generated_ids)):
        if ids and (highest := _highest(ids)) >= vocab_size:
            text = f"{name}: token id {highest} is outside the vocabulary of {vocab_size}."
            return Failure(ErrorCode.BAD_REQUEST, text)
    try:
        submit.sampling.validate_ids(vocab_size)  # the rest was when the frame was decoded
    except SamplingError as error:
        return Failure(ErrorCode.BAD_REQUEST, str(error))
    return None


def _highest(ids: array[int]) -> int:
    """The largest of u32 ids: `max` makes an object of each, 25 ns a piece on the thread that reads frames."""
    return int(np.frombuffer(ids, np.uint32).max())


def _too_long(submit: Submit, resolved: Resolved) -> Failure | None:
    context, num_prompt = resolved.info.context_length, len(submit.prompt_ids)
    max_tokens, num_generated = submit.sampling.max_tokens, len(submit.generated_ids)
    if not num_prompt:
        return Failure(ErrorCode.BAD_REQUEST, "prompt_ids must have at least 1 token, got 0.")
    if num_prompt > context or (num_prompt == context and max_tokens):
        text = f"prompt_ids has {num_prompt} tokens; with one to generate the context of {context} is too short."
        return Failure(ErrorCode.TOO_LONG, text)
    if num_generated > max_tokens or num_prompt + num_generated > context:
        text = f"generated_ids has {num_generated} tokens; max_tokens is {max_tokens} and the context {context}."
        return Failure(ErrorCode.BAD_REQUEST, text)
    # The last token of all is never computed, so it takes no place in a block.
    num_positions = min(num_prompt + max_tokens, context) - 1
    capacity = resolved.info.num_blocks * resolved.info.block_size
    if num_positions > capacity:
        text = f"{num_prompt} prompt tokens and max_tokens {max_tokens} need KV for {num_positions} tokens; "
        return Failure(ErrorCode.TOO_LONG, text + f"the pool holds {capacity} (--kv-cache-memory-bytes).")
    return None
