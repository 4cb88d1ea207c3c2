"""From token ids to what a client reads: the facade the routes use, and the per-choice state machine.

A route builds a `GenerationRequest`, `Dispatcher.start` (`gateway.resume`) turns it into a
`Generation`, and the route reads `Delta`s from that until it ends:

    generation = await dispatcher.start(request)   # 404, 429, 503 are raised here
    try:
        async for delta in generation:             # or `await generation.next()`, or `pour`
            ...
    finally:
        generation.abort()                         # nothing happens once all choices have ended

Tokens are detokenized and matched against stop strings when they arrive, not when they are read,
so a slow reader delays no abort and its unread deltas merge into one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from gateway.errors import GatewayError
from gateway.rows import Gap, append_row, append_rows, no_prompt_rows, no_rows
from gateway.stops import StopMatcher
from protocol.messages import U32, AbortReason, FinishReason, Logprobs
from protocol.sampling import SamplingParams


@lru_cache(64)
def _stop_set(ids: tuple[int, ...]) -> frozenset[int]:
    """Most choices have the same ids. One set of them stays in the caches, one for each costs every token 0.2 µs."""
    return frozenset(ids)


class TextDecoder(Protocol):
    """Ids of one choice to text, never half a code point. `gateway.detokenizer.Detokenizer` is one."""

    @property
    def next_json(self) -> Mapping[int, bytes | None] | None:
        """By id, the text that `push` would return now, as JSON: where that is known without it, and not empty.

        It holds on while no other ids come. No mapping while a character is begun.
        """

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Tap(Protocol):
    """The way of a choice's text straight to its client."""

    def put(self, json: bytes) -> bool:
        """Take the text of a token, as JSON; False, and nothing taken, while the client reads too slowly."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP call, checked and tokenized. It has len(prompts) * n choices, prompt-major.

    `sampling` is validated and complete (defaults merged, max_tokens resolved). `seed` None lets
    the gateway draw one. `decoder` makes the decoder of one choice from its prompt ids. A stop
    string that is one special token is in `sampling.stop_token_ids` as well. Without `stream`
    every choice gives exactly one delta, its last.
    """

    request_id: str
    model: str
    prompts: tuple[array[int], ...]  # u32 each, none empty
    sampling: SamplingParams
    decoder: Callable[[array[int]], TextDecoder]
    stream: bool = True
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    salt: str = ""
    traceparent: str = ""


@dataclass(slots=True)
class Delta:
    """What one choice gained since its last delta.

    `ids` and the rows of `logprobs` (present when the request asked; `k` alternatives each, 0 when
    it asked for none) are the same tokens. They may come before their text, which is held back
    while it could begin a stop string or ends inside a character; so `text` may be empty. A stop
    token is among the ids and, without `include_stop`, not in the text. The last delta of a
    choice, and no other, has a `finish_reason` (STOP or LENGTH); `stop_reason` is then the stop
    string or the one of `stop_token_ids` that ended it, None for end-of-sequence.

    A value like any other; not frozen, because one is made for each token and that takes five times as long.
    """

    index: int  # of the choice: prompt * n + j
    text: str
    ids: array[int]  # u32
    num_generated: int  # tokens of this choice up to and with this delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Carrier(Protocol):
    """What brings a choice its tokens, as the choice sees it."""

    def leave(self, reason: AbortReason) -> None:
        """The choice ends before its engine said so; called at most once."""

    def broke(self) -> None:
        """The text side failed on the ids that came (the exception is in hand): this choice cannot go on."""


class ChoiceOwner(Protocol):
    """Whose choice it is, as the choice sees it: `gateway.generation.Generation`."""

    def post(self, choice: Choice) -> None:
        """`choice` has something unread."""

    def fail(self, error: GatewayError) -> None:
        """One choice failed. Only the first failure is told."""


class Choice:
    """One of the generations of a request: its journal, its text, and its unread delta.

    It is fed token by token and ends exactly once: by `finish`, by a stop string found here, by
    `fail` or by `abort`. What comes after the end is dropped.
    """

    __slots__ = (
        "_carrier",
        "_decoder",
        "_finish_reason",
        "_generation",
        "_has_stops",
        "_matcher",
        "_next_json",
        "_stop_ids",
        "_stop_reason",
        "_tap",
        "_unread_from",
        "_unread_rows",
        "_unread_text",
        "admitted",
        "cached_tokens",
        "ended",
        "finished",
        "first_token_at",
        "generated_ids",
        "in_mailbox",
        "include_stop",
        "index",
        "prompt_ids",
        "prompt_logprobs",
        "sampling",
    )

    def __init__(
        self, request: GenerationRequest, index: int, eos_ids: tuple[int, ...], generation: ChoiceOwner
    ) -> None:
        sampling = request.sampling
        self.index = index
        self.prompt_ids = request.prompts[index // request.n]
        self.sampling = sampling
        #: Of the prompt's tokens from position 1 on, as far as they came; None when nobody asked.
        self.prompt_logprobs = no_prompt_rows(sampling)
        self.include_stop = request.include_stop
        #: The journal: every token that counts, in order.
        self.generated_ids: array[int] = array(U32)
        self.cached_tokens = 0  # prompt tokens the engine did not have to compute
        self.admitted = False  # an engine has begun with it
        self.ended = False
        self.finished = False  # it has a finish reason: it came to its own end
        self.first_token_at: float | None = None  # seconds of `time.perf_counter`
        self.in_mailbox = False
        self._generation = generation
        self._carrier: Carrier | None = None
        self._decoder = request.decoder(self.prompt_ids)
        self._has_stops = bool(request.stop)
        self._matcher = StopMatcher(request.stop, request.include_stop)
        self._stop_ids = _stop_set(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids))
        self._unread_text: list[str] = []
        self._unread_from = 0
        self._unread_rows = no_rows(sampling)
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        #: Open while nothing is unread and no character is begun: most tokens need no more than to be passed on.
        self._tap: Tap | None = None
        self._next_json: Mapping[int, bytes | None] = {}

    # --- fed by the carrier ----------------------------------------------------------------------

    def carried_by(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def admit(self, cached_tokens: int) -> None:
        """An engine begins with it. Only the first life counts: later ones compute again what is known."""
        if not self.admitted:
            self.admitted = True
            self.cached_tokens = cached_tokens

    @property
    def next_scored(self) -> int:
        """The first prompt position whose logprobs are still to come, -1 when none are."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs.own) == len(self.prompt_ids) - 1:
            return -1
        return len(self.prompt_logprobs.own) + 1

    @property
    def num_received(self) -> int:
        """Tokens and logprobs of the prompt: what engines gave it so far."""
        return len(self.generated_ids) + (0 if self.prompt_logprobs is None else len(self.prompt_logprobs.own))

    def push_prompt(self, first: int, rows: Logprobs) -> None:
        """Logprobs of the prompt's tokens at positions `first`, `first + 1`, ...

        Known ones are dropped. Raises Gap if one is missing in between, or they are not what was asked.
        """
        if self.ended:
            return
        to, count = self.prompt_logprobs, len(rows.own)
        if to is None or rows.k < to.k or first + count > len(self.prompt_ids):
            raise Gap(f"{count} logprobs of the prompt from {first} on, {rows.k} wide, were not asked")
        known = len(to.own)
        if first > known + 1:
            raise Gap(f"the prompt's logprobs at {first} came where {known + 1} was next")
        append_rows(to, rows, known + 1 - first)

    def push(
        self, first: int, ids: array[int], rows: Logprobs | None = None, start: int = 0, end: int | None = None
    ) -> None:
        """Tokens number `first`, `first + 1`, ... of this choice: `ids[start:end]`; `rows` are those of all `ids`.

        Known ones are dropped. Raises Gap if one is missing in between.
        """
        if self.ended:
            return
        if end is None:
            end = len(ids)
        generated_ids, unread_rows = self.generated_ids, self._unread_rows
        known = len(generated_ids)
        if first > known:
            raise Gap(f"token {first} came where {known} was next")
        if not known:
            self._begin()
        try:
            if (tap := self._tap) is not None:
                if first == known and end == start + 1 and (token := ids[start]) not in self._stop_ids:
                    json = self._next_json[token]
                    if json is not None and tap.put(json):
                        generated_ids.append(token)
                        return
                self.shut_tap()
            for at in range(start + known - first, end):
                token = ids[at]
                generated_ids.append(token)
                if unread_rows is not None:
                    if rows is None:
                        raise Gap(f"token {len(generated_ids) - 1} came without the logprobs that were asked")
                    append_row(unread_rows, rows, at)
                if token in self._stop_ids and self._is_stop(token) and not self.include_stop:
                    continue  # its Finished follows
                text = self._decoder.push(token)
                if self._has_stops:
                    text, matched = self._matcher.push(text, armed=len(generated_ids) > self.sampling.min_tokens)
                    if matched is not None:
                        self._unread_text.append(text)
                        self._leave(AbortReason.STOP_STRING)
                        self._end(FinishReason.STOP, matched)
                        return
                self._unread_text.append(text)
        except Gap:
            raise
        except Exception:
            if self._carrier is None:
                raise
            self._carrier.broke()
            return
        if known < len(generated_ids):
            self._generation.post(self)

    def _begin(self) -> None:
        """The first token is here."""
        if self.next_scored >= 0:
            raise Gap(f"a token came where the prompt's logprobs at {self.next_scored} were next")
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()

    def finish(self, reason: FinishReason, stop_id: int | None) -> None:
        """The engine, or `verdict`, says that the last token was the last. STOP or LENGTH."""
        if self.ended:
            return
        is_armed = len(self.generated_ids) > self.sampling.min_tokens
        text, matched = self._matcher.push(self._decoder.finish(), armed=is_armed)
        self._unread_text.append(text)
        if matched is not None:
            self._end(FinishReason.STOP, matched)
            return
        self._unread_text.append(self._matcher.finish())
        self._end(reason, stop_id if stop_id in self.sampling.stop_token_ids else None)

    def fail(self, error: GatewayError) -> None:
        """It cannot go on: the reader gets `error` after what came before, the other choices end."""
        if not self.ended:
            self.ended = True
            self._let_go().fail(error)

    def verdict(self) -> tuple[FinishReason, int | None] | None:
        """(reason, stop id) if the journal is complete, by the engine's own rules; else None.

        The answer when an engine died between the last token and its Finished.
        """
        if self.next_scored >= 0:
            return None
        num_generated = len(self.generated_ids)
        if num_generated and self._is_stop(last := self.generated_ids[-1]):
            return FinishReason.STOP, last
        if num_generated >= self.sampling.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def _is_stop(self, token: int) -> bool:
        """Whether `token`, the last of the journal, ends the choice; among min_tokens it was masked."""
        return token in self._stop_ids and len(self.generated_ids) > self.sampling.min_tokens

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.ended = self.finished = True
        self._finish_reason, self._stop_reason = reason, stop_reason
        self._let_go().post(self)

    def _let_go(self) -> ChoiceOwner:
        """Forget who it had to do with, so that who forgets it frees it, and not a pause of the garbage collector."""
        self.shut_tap()
        generation = self._generation
        del self._generation
        self._carrier = None
        return generation

    # --- for the generation ----------------------------------------------------------------------

    def abort(self) -> None:
        """Nobody waits for it any more."""
        if not self.ended:
            self.ended = True
            self._leave(AbortReason.CLIENT)
            self._let_go()

    def _leave(self, reason: AbortReason) -> None:
        if self._carrier is not None:
            self._carrier.leave(reason)

    def open_tap(self, tap: Tap) -> None:
        """All was taken: from now on tokens whose text alone is to tell go straight to `tap`, until one is another."""
        assert self._unread_rows is None, "a token's logprobs are more than its text"
        if not self._has_stops and (next_json := self._decoder.next_json) is not None:
            self._tap, self._next_json = tap, next_json

    def shut_tap(self) -> None:
        if self._tap is not None:
            self._tap = None
            self._unread_from = len(self.generated_ids)

    def take_text(self) -> str:
        """The unread text, for who needs no more of a delta; not the last of a choice."""
        text = self._unread_text
        self._unread_from = len(self.generated_ids)
        taken = text[0] if len(text) == 1 else "".join(text)
        text.clear()
        return taken

    def take(self) -> Delta:
        """All that is unread."""
        ids, rows, text = self.generated_ids, self._unread_rows, self._unread_text
        num_generated = len(ids)
        unread = ids[self._unread_from :]
        delta = Delta(self.index, "".join(text), unread, num_generated, rows, self._finish_reason, self._stop_reason)
        text.clear()
        self._unread_from = num_generated
        if rows is not None:
            self._unread_rows = no_rows(self.sampling)
        return delta
