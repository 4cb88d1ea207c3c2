"""What `LLM.generate` returns: vLLM's names for the parts of an answer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.logprobs import token_text
from gateway.stream import Delta
from gateway.tokenizer import Tokenizer
from protocol.messages import Logprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position: its logprob, its place among all (1 is the most likely), its text."""

    logprob: float
    rank: int
    decoded_token: str


#: Of one position: the token that is there, and the most likely ones.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `stop_reason` is the stop string or id that ended it, None for end-of-sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, `prompt` being None where it was given as ids.

    `num_cached_tokens` of the prompt were in the engine's prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int


def completion_output(delta: Delta, tokenizer: Tokenizer, stop_strings: Mapping[int, str]) -> CompletionOutput:
    """An answer from its only delta. `stop_strings` are those that the engine looked for as ids."""
    assert delta.finish_reason is not None
    rows, reason = delta.logprobs, delta.stop_reason
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.ids.tolist(),
        cumulative_logprob=None if rows is None else sum(rows.own),
        logprobs=None if rows is None else _positions(delta.ids, rows, rows.k, tokenizer),
        finish_reason=delta.finish_reason.value,
        stop_reason=stop_strings.get(reason, reason) if isinstance(reason, int) else reason,
    )


def prompt_logprobs(
    ids: array[int], rows: Logprobs | None, k: int | None, tokenizer: Tokenizer
) -> list[PositionLogprobs | None] | None:
    """Those of a prompt: None for its first token, before which is nothing; `k` None where nobody asked."""
    if k is None:
        return None
    assert rows is not None, "a whole answer has the logprobs of its prompt"
    return [None, *_positions(ids[1:], rows, k, tokenizer)]


def _positions(ids: array[int], rows: Logprobs, k: int, tokenizer: Tokenizer) -> list[PositionLogprobs]:
    """For each of `ids` its own logprob first, then those of the `k` most likely, most likely first."""
    raw = tokenizer.token_bytes(skip_special_tokens=False)
    found = []
    for at, token in enumerate(ids):
        position = {token: Logprob(rows.own[at], rows.rank[at], token_text(raw[token]))}
        for place in range(k):
            other = rows.top_ids[at * rows.k + place]
            if other not in position:
                position[other] = Logprob(rows.top[at * rows.k + place], place + 1, token_text(raw[other]))
        found.append(position)
    return found
