"""Places the choices of a request on engines, and again when an engine is lost.

A choice that loses its engine is submitted anew with its prompt ids, the ids generated so far and
the same seed, to an engine of equal numerics: it goes on with the next token, bit for bit. Its
reader sees nothing of it but a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from gateway.errors import EngineFailed, GatewayError, Unavailable, from_failure
from gateway.generation import Generation
from gateway.placement import Placement, Siblings
from gateway.router import Router, Seat, stop_process
from gateway.slices import Slices
from gateway.stream import GenerationRequest
from protocol.messages import ErrorCode, Failure, Serving
from protocol.metrics import Instruments
from protocol.sampling import choice_seed

log = logging.getLogger(__name__)

#: Pause after an engine refused a choice for want of room, and between looks at those that wait.
_RETRY_S = 0.1

_STOPPING = "the gateway is stopping; try again."

#: Refusals that are about the engine and not about the choice, so that another try makes sense.
_PASSING = {ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.DIGEST_MISMATCH, ErrorCode.NUMERICS_MISMATCH}


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How long and how often a choice is tried.

    `credit_wait_s`: how long a new request waits in all, for an engine and for room there, before it is refused.
    `resume_timeout_s`: the wait for an engine of equal numerics after a loss; then, with `resume_inexact`, one of
    the same model does. `resume_attempts`: engines that a choice may lose in a row without a token from them.
    """

    credit_wait_s: float = 10.0
    resume_timeout_s: float = 30.0
    resume_attempts: int = 3
    resume_inexact: bool = True


class Dispatcher:
    """Starts generations and keeps them going across the lives of engines."""

    def __init__(
        self,
        router: Router,
        settings: DispatchSettings,
        instruments: Instruments,
        *,
        on_crash: Callable[[], None] = stop_process,
    ) -> None:
        self._router = router
        self._settings = settings
        self._resumes = instruments.counter("resumes_total")
        self._on_crash = on_crash
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving: list[Placement] = []
        self._mover: asyncio.Task[None] | None = None
        self._on_trial: Placement | None = None
        self._look_again = asyncio.Event()
        router.watch(self._look_again.set)

    async def await_serving(self, model: str) -> Serving:
        """What is served under a name; an engine that died has as long to come back as a request waits for room.

        Raises ModelNotFound or Unavailable.
        """
        return await self._router.await_serving(model, self._settings.credit_wait_s)

    async def start(self, request: GenerationRequest, waited_s: float = 0.0) -> Generation:
        """Returns once the request's first choice is with an engine. `waited_s` is what it waited in `await_serving`.

        Raises ModelNotFound, Overloaded (no credit within the bounded wait) or Unavailable (no engine). If it
        is cancelled while waiting (the client left), nothing stays behind.
        """
        generation = Generation(request, self._router.last_serving(request.model).eos_ids)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        siblings = [Siblings() if request.n > 1 else None for _ in request.prompts]
        first, *rest = [
            Placement(
                self,
                request,
                choice,
                seed=choice_seed(seed, choice.index % request.n),
                siblings=siblings[choice.index // request.n],
                patience_s=self._settings.credit_wait_s,
            )
            for choice in generation.choices
        ]
        if not _is_settled(first):
            began, left_s = time.monotonic(), max(0.0, self._settings.credit_wait_s - waited_s)
            seat = await self._seat(first, left_s, patient=False)
            first.patience_s = left_s - (time.monotonic() - began)
            if self._is_closed:
                seat.connection.release(seat.handle)
                raise Unavailable(_STOPPING)
            first.submit(seat)
        self._generations.add(generation)
        if rest:
            # Only the first may be refused for want of room; the others wait for as long as it takes.
            self._spawn("place", self._place(rest, self._settings.resume_timeout_s, patient=True), rest)
        return generation

    async def close(self) -> None:
        """Fail what is still open with Unavailable, and wait for the tasks."""
        self._is_closed = True
        for generation in list(self._generations):
            generation.fail(Unavailable(_STOPPING))
        self._router.dismiss_waiting(Unavailable(_STOPPING))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- new work --------------------------------------------------------------------------------

    async def _seat(self, placement: Placement, wait_s: float, *, patient: bool) -> Seat:
        model, num_prompt = placement.request.model, len(placement.choice.prompt_ids)
        near = placement.siblings.link if placement.siblings is not None else None
        while True:
            seat = await self._router.acquire(model, num_prompt, near=near, wait_s=wait_s, patient=patient)
            if not seat.connection.closed:
                return seat

    async def _place(self, placements: list[Placement], wait_s: float, *, patient: bool) -> None:
        slices = Slices()
        for placement in placements:
            try:
                if not _is_settled(placement):
                    seat = await self._seat(placement, wait_s, patient=patient)
                    placement.waiting = None
                    placement.submit(seat)
            except GatewayError as error:
                placement.choice.fail(error)
                return
            await slices.turn()

    # --- told by placements ----------------------------------------------------------------------

    def refused(self, placement: Placement, failure: Failure) -> None:
        """The engine ended it with an error: another try where that can help, else the client gets it."""
        has_begun = placement.has_begun
        patience_s = self._settings.resume_timeout_s if has_begun else placement.patience_s
        waited_s = placement.waited_s()
        if failure.code not in _PASSING or waited_s >= patience_s:
            placement.choice.fail(from_failure(failure))
        elif has_begun:
            placement.retry_at = time.monotonic() + _RETRY_S
            self._move(placement)
        else:
            placement.origin = None
            self._spawn("place again", self._place_later(placement, patience_s - waited_s), [placement])

    async def _place_later(self, placement: Placement, wait_s: float) -> None:
        await asyncio.sleep(_RETRY_S)
        await self._place([placement], wait_s, patient=False)

    def lost(self, placement: Placement) -> None:
        """Its engine is gone."""
        if _is_settled(placement):
            return
        gained = placement.choice.num_received - placement.num_known
        placement.deaths = 0 if gained else placement.deaths + 1
        if placement.deaths >= self._settings.resume_attempts:
            placement.choice.fail(
                EngineFailed(
                    f"{placement.deaths} engines in a row were lost while they worked on this request, "
                    "without a token from them; it is not tried again."
                )
            )
            return
        placement.waited_s()
        self._move(placement)

    def count_resume(self, exact: bool) -> None:
        self._resumes.labels(exact=str(exact).lower()).inc()

    # --- moving to another engine ----------------------------------------------------------------

    def _move(self, placement: Placement) -> None:
        self._moving.append(placement)
        self._look_again.set()
        if self._mover is None or self._mover.done():
            self._mover = self._spawn("move", self._move_all(), [])

    async def _move_all(self) -> None:
        """Place those that lost their engine, oldest loss first, until none is left."""
        while self._moving:
            self._look_again.clear()
            batch, self._moving = self._moving, []
            waiting = []
            slices = Slices()
            for placement in batch:
                if not self._is_moved(placement):
                    waiting.append(placement)
                await slices.turn()
            self._moving = waiting + self._moving
            if self._moving:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S):
                        await self._look_again.wait()

    def _is_moved(self, placement: Placement) -> bool:
        """Whether it needs no further look: it has a new engine, or has ended."""
        if _is_settled(placement):
            return True
        if time.monotonic() < placement.retry_at:
            return False
        waited_s = placement.waited_s()
        on_last_attempt = placement.deaths > 0 and placement.deaths == self._settings.resume_attempts - 1
        if on_last_attempt and self._on_trial is not None and self._on_trial.is_unproven:
            # One at a time, so that a request that kills engines takes no other one's last attempt with it.
            return False
        seat = self._seat_elsewhere(placement, waited_s)
        if seat is not None:
            placement.submit(seat)
            if on_last_attempt:
                self._on_trial = placement
        elif waited_s >= self._settings.resume_timeout_s:
            text = f"the engine was lost, and none that can go on came in {self._settings.resume_timeout_s:g} s."
            placement.choice.fail(Unavailable(text))
        return placement.choice.ended or seat is not None

    def _seat_elsewhere(self, placement: Placement, waited_s: float) -> Seat | None:
        """Equal numerics if possible; the same model where nothing received binds to them, or after the timeout."""
        origin = placement.origin
        assert origin is not None
        seat = self._router.seat_for_resumed(lambda offer: offer.numerics == origin.numerics)
        late = waited_s >= self._settings.resume_timeout_s and self._settings.resume_inexact
        if seat is None and (late or not placement.choice.num_received):
            seat = self._router.seat_for_resumed(lambda offer: offer.digest == origin.digest)
        return seat

    # --- tasks -----------------------------------------------------------------------------------

    def _spawn(self, name: str, work: Coroutine[None, None, None], placements: list[Placement]) -> asyncio.Task[None]:
        """A held task. Its cancellation is how `placements` leave the line for credit."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        for placement in placements:
            placement.waiting = task
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("task_crashed", exc_info=error, extra={"task": task.get_name()})
            self._on_crash()


def _is_settled(placement: Placement) -> bool:
    """Whether nothing is left to generate; a choice whose journal is complete is ended here."""
    choice = placement.choice
    if not choice.ended and (verdict := choice.verdict()) is not None:
        choice.finish(*verdict)
    return choice.ended
