"""Server-sent events: a stream of ready bytes, kept alive, and ended with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from gateway.client import Writer, client
from gateway.errors import ClientLeft

#: Proxies commonly give up on a silent connection after 30 to 60 s.
KEEP_ALIVE_S = 15.0

KEEP_ALIVE = b": keep-alive\n\n"

#: sse-starlette's, made once: they are the same for every stream.
_HEADERS = tuple(EventSourceResponse(iter(())).raw_headers)


class EventStream(EventSourceResponse):
    """Sends what `produce` writes, with a comment every KEEP_ALIVE_S.

    Headers are sse-starlette's. What it does for each stream and event is not needed here (headers, a lock, an
    encoding, a debug line, and a cancel scope, together 36 % of the time at 256 streams), and its watch for
    SIGTERM would cut streams that have the gateway's grace period to finish.
    """

    def __init__(self, produce: Callable[[Writer], Awaitable[None]], on_end: Callable[[], None]) -> None:
        """`on_end` is called once when the stream is over, however it ended."""
        self.status_code = 200
        self.raw_headers = list(_HEADERS)
        self._produce = produce
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = client(scope)
        try:
            with contextlib.suppress(ClientLeft):
                await reader.unless_left(self._stream(send, reader.writer))
        finally:
            self._on_end()

    async def _stream(self, send: Send, writer: Writer) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep_alive = _KeepAlive(writer)
        try:
            await self._produce(writer)
        finally:
            keep_alive.cancel()
        await writer.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _KeepAlive:
    """A comment every KEEP_ALIVE_S, until it is cancelled. A client with something unread needs none."""

    __slots__ = ("_loop", "_timer", "_writer")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._write)

    def _write(self) -> None:
        if not self._writer.write_paused:
            self._writer.write_body(KEEP_ALIVE)
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._write)

    def cancel(self) -> None:
        self._timer.cancel()


def error_event(body: bytes) -> bytes:
    """An error after the headers: its body as an event, and the stream ends."""
    return b"data: " + body + b"\n\n"
