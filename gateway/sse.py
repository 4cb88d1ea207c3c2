"""Server-sent events: a stream of ready bytes, kept alive, and ended with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientLeft
from gateway.leaving import unless_left

#: Proxies commonly give up on a silent connection after 30 to 60 s.
KEEP_ALIVE_S = 15.0

KEEP_ALIVE = b": keep-alive\n\n"

#: Sends whole events as bytes; awaited, it holds up who writes faster than the client reads.
Write = Callable[[bytes], Awaitable[None]]


class EventStream(EventSourceResponse):
    """Sends what `produce` writes, with a comment every KEEP_ALIVE_S.

    Headers are sse-starlette's. What it does for each event is not needed here (an encoding, a
    debug line, and a cancel scope, together 36 % of the time at 256 streams), and its
    watch for SIGTERM would cut streams that have the gateway's grace period to finish.
    """

    def __init__(self, produce: Callable[[Write], Awaitable[None]], on_end: Callable[[], None]) -> None:
        """`on_end` is called once when the stream is over, however it ended."""
        super().__init__(iter(()))
        self._produce = produce
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeft):
                await unless_left(receive, self._stream(send, scope["state"]["send"]))
        finally:
            self._on_end()

    async def _stream(self, send: Send, send_piece: Send) -> None:
        def write(events: bytes) -> Awaitable[None]:
            return send_piece({"type": "http.response.body", "body": events, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping_alive = asyncio.create_task(_keep_alive(write), name="keep-alive")
        try:
            await self._produce(write)
        finally:
            keeping_alive.cancel()
            await asyncio.wait({keeping_alive})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _keep_alive(write: Write) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        await write(KEEP_ALIVE)


def error_event(body: bytes) -> bytes:
    """An error after the headers: its body as an event, and the stream ends."""
    return b"data: " + body + b"\n\n"
