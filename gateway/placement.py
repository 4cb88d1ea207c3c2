"""One choice on its way through engines: what its link and its text side have to do with each other."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from gateway.connection import Connection
from gateway.engines import EngineLink
from gateway.errors import BadRequest, EngineFailed
from gateway.router import Seat
from gateway.rows import Gap
from gateway.stream import Choice, GenerationRequest
from protocol.codec import WireError
from protocol.messages import AbortReason, Failure, Finished, FinishReason, Logprobs, Serving, Submit

log = logging.getLogger(__name__)


class PlacementOwner(Protocol):
    """Who finds the engines, as a placement sees it: `gateway.resume.Dispatcher`."""

    def refused(self, placement: Placement, failure: Failure) -> None:
        """The engine ended it with an error."""

    def lost(self, placement: Placement) -> None:
        """Its engine is gone."""

    def count_resume(self, exact: bool) -> None:
        """Another engine has taken it on."""


class Siblings:
    """Choices of one prompt. The first on a connection leads: the others wait there for its blocks."""

    def __init__(self) -> None:
        self.link: EngineLink | None = None  # where the last of them went
        self._connection: Connection | None = None
        self._group = 0

    def join(self, seat: Seat) -> tuple[int, bool]:
        """(group, whether it leads) of the next of them, on the seat's connection."""
        leads = seat.connection is not self._connection
        if leads:
            self.link, self._connection, self._group = seat.link, seat.connection, seat.connection.new_group()
        return self._group, leads


class Placement:
    """One choice on its way through engines: receives for it, and is its carrier."""

    __slots__ = (
        "_owner",
        "choice",
        "deaths",
        "num_known",
        "origin",
        "patience_s",
        "push",
        "request",
        "resumed_exactly",
        "retry_at",
        "seat",
        "seed",
        "siblings",
        "since",
        "waiting",
    )

    def __init__(
        self,
        owner: PlacementOwner,
        request: GenerationRequest,
        choice: Choice,
        *,
        seed: int,
        siblings: Siblings | None,
        patience_s: float,
    ) -> None:
        self._owner = owner
        self.request = request
        self.choice = choice
        self.seed = seed
        self.siblings = siblings
        self.patience_s = patience_s  # for how long it may still wait for its first engine
        self.seat: Seat | None = None
        self.waiting: asyncio.Task[None] | None = None  # in the line for credit
        self.origin: Serving | None = None  # what the engine that had it last offered
        self.since: float | None = None  # when it last lost its engine or was refused, until admitted
        self.retry_at = 0.0
        self.num_known = 0  # what it had received when its present engine got it
        self.deaths = 0  # engines lost in a row without a token, or a logprob of the prompt, from them
        self.resumed_exactly: bool | None = None  # None when not resumed, or counted already
        self.push = choice.push
        choice.carried_by(self)

    @property
    def has_begun(self) -> bool:
        """Whether some engine had taken it on, so that it goes on and does not start."""
        return self.choice.admitted or bool(self.choice.generated_ids)

    @property
    def is_unproven(self) -> bool:
        """Whether it is with an engine that has given it nothing yet."""
        return self.seat is not None and self.choice.num_received == self.num_known

    def waited_s(self) -> float:
        """For how long no engine has had it; the clock starts with the first call."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        return now - self.since

    # --- receiver --------------------------------------------------------------------------------

    def admitted(self, cached_tokens: int) -> None:
        self.since = None
        self.choice.admit(cached_tokens)
        if self.resumed_exactly is not None:
            self._owner.count_resume(self.resumed_exactly)
            self.resumed_exactly = None

    def push_prompt(self, first: int, rows: Logprobs) -> None:
        self.choice.push_prompt(first, rows)

    def finished(self, message: Finished) -> None:
        num_generated = len(self.choice.generated_ids)
        if message.error is None and message.num_generated != num_generated:
            raise Gap(f"{message.num_generated} tokens were generated, {num_generated} came")
        if message.error is None and (missing := self.choice.next_scored) >= 0 and not self.choice.ended:
            raise Gap(f"the end came where the prompt's logprobs at {missing} were next")
        self.seat = None
        if message.error is not None:
            self._owner.refused(self, message.error)
        elif message.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.choice.finish(message.reason, message.stop_id)
        else:
            self.choice.fail(EngineFailed("the engine ended the request on its own account."))

    def lost(self, reason: str) -> None:
        self.seat = None
        self._owner.lost(self)

    # --- carrier ---------------------------------------------------------------------------------

    def leave(self, reason: AbortReason) -> None:
        seat, self.seat = self.seat, None
        if seat is not None:
            seat.connection.abort(seat.handle, reason)
        elif self.waiting is not None:
            self.waiting.cancel()  # its siblings in the line leave with it

    def broke(self) -> None:
        log.exception("choice_failed", extra={"request_id": self.request.request_id})
        self.leave(AbortReason.CLIENT)
        self.choice.fail(EngineFailed("the gateway could not make text of the generated tokens."))

    # --- its own --------------------------------------------------------------------------------

    def submit(self, seat: Seat) -> None:
        """Give the choice to an engine."""
        choice, request = self.choice, self.request
        resume = self.origin is not None
        if self.origin is not None:
            self.resumed_exactly = self.origin.numerics == seat.serving.numerics
        group, leads = None, False
        if self.siblings is not None and not resume:
            group, leads = self.siblings.join(seat)
        self.seat, self.origin, self.num_known = seat, seat.serving, choice.num_received
        message = Submit(
            handle=seat.handle,
            request_id=request.request_id,
            prompt_ids=choice.prompt_ids,
            generated_ids=choice.generated_ids,
            sampling=choice.sampling,
            seed=self.seed,
            traceparent=request.traceparent,
            priority=request.priority,
            salt=request.salt,
            group=group,
            leader=leads,
            resume=resume,
            prompt_logprobs_from=choice.next_scored,
            expect_digest=seat.serving.digest,
            expect_numerics=seat.serving.numerics,
        )
        try:
            seat.connection.submit(message, self)
        except WireError as error:
            self.seat = None
            seat.connection.release(seat.handle)
            choice.fail(BadRequest(str(error)))
