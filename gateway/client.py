"""The client of a request as the server offers it beside ASGI: a way to write to it, and word when it has left.

ASGI tells of a client that left to who waits in `receive`, which takes a task of its own beside the work that is to end
with the client, and one for the work: seven tasks a request, 0.3 ms of processor time. Here the server calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar, cast

from gateway.errors import ClientLeft

T = TypeVar("T")

_EXTENSION = "sluicegate.client"


class Writer(Protocol):
    """The body of a response as the server takes it: whole events, without an `await` for each.

    Who looks at `write_paused` before a write, and waits for `drain` where it is, keeps no more in memory
    than a connection's buffer. ASGI's `send` is for what comes before and after.
    """

    @property
    def write_paused(self) -> bool:
        """Whether the client reads too slowly: it is time to wait."""

    def write_body(self, piece: bytes, before: bytes = b"", after: bytes = b"") -> None:
        """`before`, `piece` and `after` as one piece. To a client that has left it goes nowhere."""

    async def drain(self) -> None:
        """Returns when writing is not paused."""


class Client:
    """Who waits for the answer to one request."""

    __slots__ = ("_has_left", "_is_working", "_task", "writer")

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._has_left = False
        self._task: asyncio.Task[Any] | None = None  # the request's
        self._is_working = False  # on what ends if it leaves now

    def extensions(self) -> dict[str, dict[object, object]]:
        """For the server: a scope's entry of this name, by which the application finds it."""
        return {_EXTENSION: {"client": self}}

    def left(self) -> None:
        """For the server: it has closed the connection. Not to be called by the work itself."""
        self._has_left = True
        if self._is_working and self._task is not None:
            self._task.cancel()

    def has_left(self) -> bool:
        return self._has_left

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves first: ClientLeft is raised then.

        All of a request's work is done in one task.
        """
        if self.has_left():
            work.close()
            raise ClientLeft("The client closed the connection.")
        if self._task is None:
            self._task = asyncio.current_task()
        task = self._task
        assert task is not None, "coroutines run in tasks"
        assert not self._is_working, "one work at a time"
        self._is_working = True
        try:
            return await work
        except asyncio.CancelledError:
            # Who else cancelled it is owed the cancellation (as in `asyncio.timeout`).
            if self.has_left() and not task.uncancel():
                raise ClientLeft("The client closed the connection.") from None
            raise
        finally:
            self._is_working = False


def client(scope: Mapping[str, Any]) -> Client:
    """Whose request it is."""
    return cast(Client, scope["extensions"][_EXTENSION]["client"])
