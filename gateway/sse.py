"""Server-sent events: a stream of ready bytes, kept alive, and ended with its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

#: Proxies commonly give up on a silent connection after 30 to 60 s.
KEEP_ALIVE_S = 15.0

_COMMENT = "keep-alive"
KEEP_ALIVE = f": {_COMMENT}\n\n".encode()

# sse-starlette would cut every stream at the first SIGTERM. Here streams have the gateway's grace
# period to finish, and after it end with an error event (`gateway.server`).
AppStatus.enable_automatic_graceful_drain = False


class EventStream(EventSourceResponse):
    """Sends what `events` yields, whole events as bytes, with a comment in every KEEP_ALIVE_S of silence."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """`on_end` is called once when the stream is over, however it ended."""
        super().__init__(
            events,
            ping=KEEP_ALIVE_S,
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment=_COMMENT, sep="\n"),
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def error_event(body: bytes) -> bytes:
    """An error after the headers: its body as an event, and the stream ends."""
    return b"data: " + body + b"\n\n"
