"""Server-sent events: a stream of ready bytes, kept alive, and ended with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientLeft
from gateway.leaving import unless_left

#: Proxies commonly give up on a silent connection after 30 to 60 s.
KEEP_ALIVE_S = 15.0

KEEP_ALIVE = b": keep-alive\n\n"

#: The extension of ASGI by which the server offers a request's Writer, as its `writer`.
WRITER = "sluicegate.writer"


class Writer(Protocol):
    """The body of a response as the server takes it: whole events, without an `await` for each.

    Who looks at `is_full` before a write, and waits for `drain` where it is, keeps no more in memory
    than a connection's buffer. ASGI's `send` is for what comes before and after.
    """

    @property
    def is_full(self) -> bool:
        """Whether the client reads more slowly than is written."""

    def write(self, piece: bytes) -> None:
        """To a client that has left it goes nowhere."""

    async def drain(self) -> None:
        """Returns when it is not full."""


class EventStream(EventSourceResponse):
    """Sends what `produce` writes, with a comment every KEEP_ALIVE_S.

    Headers are sse-starlette's. What it does for each event is not needed here (an encoding, a
    debug line, and a cancel scope, together 36 % of the time at 256 streams), and its
    watch for SIGTERM would cut streams that have the gateway's grace period to finish.
    """

    def __init__(self, produce: Callable[[Writer], Awaitable[None]], on_end: Callable[[], None]) -> None:
        """`on_end` is called once when the stream is over, however it ended."""
        super().__init__(iter(()))
        self._produce = produce
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await unless_left(receive, self._stream(send, scope["extensions"][WRITER]["writer"]))
        finally:
            self._on_end()

    async def _stream(self, send: Send, writer: Writer) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping_alive = asyncio.create_task(_keep_alive(writer), name="keep-alive")
        try:
            await self._produce(writer)
        finally:
            keeping_alive.cancel()
            await asyncio.wait({keeping_alive})
        await writer.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _keep_alive(writer: Writer) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        await writer.drain()
        writer.write(KEEP_ALIVE)


def error_event(body: bytes) -> bytes:
    """An error after the headers: its body as an event, and the stream ends."""
    return b"data: " + body + b"\n\n"
