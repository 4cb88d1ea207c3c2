"""The choices of one request as one reader sees them: deltas asked for, or poured out as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gateway.errors import GatewayError
from gateway.stream import Choice, Delta, GenerationRequest


class Gate(Protocol):
    """Whether the way to a client is open, as `Generation.pour` sees it."""

    @property
    def is_full(self) -> bool: ...

    async def drain(self) -> None:
        """Returns when it is not full."""


class Generation:
    """The choices of one request and the mailbox they share. One reader."""

    def __init__(self, request: GenerationRequest, eos_ids: tuple[int, ...]) -> None:
        self._stream = request.stream
        self._mailbox: deque[Choice] = deque()
        self._error: GatewayError | None = None
        self._reader: asyncio.Future[None] | None = None
        #: Where deltas go while `pour` waits for them.
        self._outlet: tuple[Callable[[Delta], None], Gate] | None = None
        self.choices = tuple(Choice(request, index, eos_ids, self) for index in range(len(request.prompts) * request.n))
        self._num_unfinished = len(self.choices)

    async def next(self) -> Delta | None:
        """The next delta of any choice; None once every choice has given its last.

        Safe to cancel (`asyncio.wait_for`): no delta is lost. Raises a `gateway.errors` exception when
        a choice failed, after the deltas that came before it; the other choices are then aborted.
        """
        while not self._mailbox:
            if not self._num_unfinished:
                return None
            if self._error is not None:
                raise self._error
            await self._news()
        return self._take_next()

    async def pour(self, put: Callable[[Delta], None], gate: Gate) -> None:
        """Hand `put` each delta as it comes, until every choice has given its last.

        `put` is called by whoever brings a token, and no task wakes for it. While `gate` is full nothing is
        put, and deltas merge. Raises as `next`, and what `put` raises.
        """
        while True:
            while self._mailbox and not gate.is_full:
                put(self._take_next())
            if gate.is_full:
                await gate.drain()
            elif not self._num_unfinished:
                return
            elif self._error is not None:
                raise self._error
            else:
                self._outlet = put, gate
                await self._news()

    async def _news(self) -> None:
        """Returns when there is something to read, or nothing will be."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = self._outlet = None

    def _take_next(self) -> Delta:
        choice = self._mailbox.popleft()
        choice.in_mailbox = False
        return self._take(choice)

    def _take(self, choice: Choice) -> Delta:
        delta = choice.take()
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
        return delta

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        delta = await self.next()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def abort(self) -> None:
        """The client has left: every unfinished choice is ended at its engine. Idempotent."""
        for choice in self.choices:
            choice.abort()

    @property
    def has_failed(self) -> bool:
        """A choice failed, and the others were ended for it."""
        return self._error is not None

    # --- for its choices -------------------------------------------------------------------------

    def post(self, choice: Choice) -> None:
        """`choice` has something unread."""
        if choice.in_mailbox or not (self._stream or choice.finished):
            return
        if self._outlet is not None:
            put, gate = self._outlet
            if not gate.is_full:
                self._pour_one(choice, put)
                return
        choice.in_mailbox = True
        self._mailbox.append(choice)
        self._wake()

    def _pour_one(self, choice: Choice, put: Callable[[Delta], None]) -> None:
        """In place of `pour`, which is woken for the end."""
        try:
            put(self._take(choice))
        except Exception as error:
            self._wake(error)
        else:
            if not self._num_unfinished:
                self._wake()

    def fail(self, error: GatewayError) -> None:
        """One choice failed. Only the first failure is told."""
        if self._error is None:
            self._error = error
            self.abort()
            self._wake()

    def _wake(self, error: Exception | None = None) -> None:
        """Let the reader go on, or fail with an `error` that is not the generation's own."""
        self._outlet = None
        if self._reader is None or self._reader.done():
            return
        if error is None:
            self._reader.set_result(None)
        else:
            self._reader.set_exception(error)
