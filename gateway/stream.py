"""From token ids to what a client reads: the facade the routes use, and the per-choice state machine.

A route builds a `GenerationRequest`, `Dispatcher.start` (`gateway.resume`) turns it into a
`Generation`, and the route reads `Delta`s from that until it ends:

    generation = await dispatcher.start(request)   # 404, 429, 503 are raised here
    try:
        async for delta in generation:             # or `await generation.next()`
            ...
    finally:
        generation.abort()                         # nothing happens once all choices have ended

Tokens are detokenized and matched against stop strings when they arrive, not when they are read,
so a slow reader delays no abort and its unread deltas merge into one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from protocol.messages import FinishReason, Logprobs
from protocol.sampling import SamplingParams


class TextDecoder(Protocol):
    """Ids of one choice to text, never half a code point. `gateway.detokenizer.Detokenizer` is one."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP call, checked and tokenized. It has len(prompts) * n choices, prompt-major.

    `sampling` is validated and complete (defaults merged, max_tokens resolved). `seed` None lets
    the gateway draw one. `decoder` makes the decoder of one choice from its prompt ids. A stop
    string that is one special token is in `sampling.stop_token_ids` as well.
    """

    request_id: str
    model: str
    prompts: tuple[array[int], ...]  # u32 each
    sampling: SamplingParams
    decoder: Callable[[array[int]], TextDecoder]
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    salt: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained since its last delta.

    `ids` and the rows of `logprobs` (present when the request asked; `k` alternatives each) are
    the same tokens; they may come before their text, which is held back while it could begin a
    stop string or ends inside a character. A stop token is among the ids and not in the text.
    The last delta of a choice, and no other, has a `finish_reason` (STOP or LENGTH);
    `stop_reason` is then the stop string or the stop id that ended it, None for end-of-sequence.
    """

    index: int  # of the choice: prompt * n + j
    text: str
    ids: array[int]  # u32
    num_generated: int  # tokens of this choice up to and with this delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Choice:
    """One of the generations of a request; readable at any time by the route for its usage."""

    index: int
    prompt_ids: array[int]  # u32
    generated_ids: array[int]  # u32: the journal, all tokens that count
    cached_tokens: int  # prompt tokens the engine did not have to compute
    admitted: bool  # an engine has begun with it


class Generation:
    """The choices of one request and the mailbox they share. One reader."""

    choices: tuple[Choice, ...]

    async def next(self) -> Delta | None:
        """The next delta of any choice; None once every choice has given its last.

        Safe to cancel (`asyncio.wait_for`): no delta is lost. Raises a `gateway.errors` exception when
        a choice failed, after the deltas that came before it; the other choices are then aborted.
        """
        raise NotImplementedError

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        delta = await self.next()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def abort(self) -> None:
        """The client has left: every unfinished choice is ended at its engine. Idempotent."""
        raise NotImplementedError
