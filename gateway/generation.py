"""The choices of one request as one reader sees them: deltas asked for, or poured out as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from gateway.errors import GatewayError
from gateway.stream import Choice, Delta, GenerationRequest


class Outlet(Protocol):
    """The way to a client, as `Generation.pour` sees it."""

    def put(self, choice: Choice) -> bool:
        """Take what is unread of a choice; False, and nothing taken, while the client reads too slowly.

        May open a tap of the choice (`Choice.open_tap`), which is shut when `pour` ends.
        """

    async def drain(self) -> None:
        """Returns when `put` will take something."""


class Generation:
    """The choices of one request and the mailbox they share. One reader."""

    def __init__(self, request: GenerationRequest, eos_ids: tuple[int, ...]) -> None:
        self._stream = request.stream
        self._mailbox: deque[Choice] = deque()
        self._error: GatewayError | None = None
        self._reader: asyncio.Future[None] | None = None
        #: Where what comes goes while `pour` waits for it; the mailbox is then empty.
        self._outlet: Outlet | None = None
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

    async def comes_within(self, seconds: float) -> bool:
        """Whether `next` has something to tell, for which at most so long is waited."""
        if self._is_silent():
            timer = asyncio.get_running_loop().call_later(seconds, self._wake)
            try:
                await self._news()
            finally:
                timer.cancel()
        return not self._is_silent()

    def _is_silent(self) -> bool:
        return not self._mailbox and self._num_unfinished > 0 and self._error is None

    async def pour(self, outlet: Outlet) -> None:
        """Hand `outlet` what comes, until every choice has given its last.

        `put` is called by whoever brings a token, and no task wakes for it. Where nothing is taken deltas
        merge. Raises as `next`, and what `put` raises.
        """
        try:
            while True:
                while self._mailbox:
                    choice = self._mailbox[0]
                    if not outlet.put(choice):
                        await outlet.drain()
                        continue
                    self._mailbox.popleft()
                    choice.in_mailbox = False
                    self._num_unfinished -= choice.finished
                if not self._num_unfinished:
                    return
                if self._error is not None:
                    raise self._error
                self._outlet = outlet
                await self._news()
        finally:
            for choice in self.choices:
                choice.shut_tap()

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
        self._num_unfinished -= choice.finished
        return choice.take()

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
        if self._outlet is not None:
            try:
                is_taken = self._outlet.put(choice)
            except Exception as error:
                self._wake(error)
                return
            if is_taken:
                if choice.finished:
                    self._num_unfinished -= 1
                    if not self._num_unfinished:
                        self._wake()
                return
        elif choice.in_mailbox or not (self._stream or choice.finished):
            return
        choice.in_mailbox = True
        self._mailbox.append(choice)
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
