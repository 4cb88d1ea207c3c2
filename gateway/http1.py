"""HTTP/1 as clients speak it, where uvicorn's httptools protocol leaves something open.

A head and the time for a request are bounded (the middleware sees a request only when its head is
whole: 32 MB of header lines were taken in and kept). A request is answered also to who asks for an
upgrade, to who speaks HTTP/1.0, and to who ends its own side of the connection. What is no HTTP is
refused with an error body like any other.
"""

from __future__ import annotations

import asyncio
import http
import sys
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import errors
from gateway.errors import BadRequest, GatewayError, HeadTooLarge, RequestTimeout

#: Request line and headers. nginx takes 32 KiB; what comes in one read with the end of the head is not counted.
MAX_HEAD_BYTES = 64 * 1024

#: Who asks to speak another protocol names it in these; without them the request is what it is.
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_S = 0.1


class Http1Protocol(HttpToolsProtocol):
    """uvicorn's protocol with the gaps filled. A request has to be whole `request_timeout_s` after it began."""

    request_timeout_s = 60.0

    _in_head = True
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_is_whole()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            text = f"The request's line and headers are larger than {MAX_HEAD_BYTES} bytes, the most that is read."
            self._refuse(HeadTooLarge(text))
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(BadRequest("This is no HTTP/1.1 request."))
            return
        if self._in_head:
            self._head_bytes += len(data)

    def _refuse(self, error: GatewayError) -> None:
        """Answer what never became a request, unless an answer has begun, and close."""
        cycle = self.cycle  # None before the first request
        if cycle is None or not cycle.response_started or cycle.response_complete:  # type: ignore[redundant-expr]
            body, status = errors.body(error), http.HTTPStatus(errors.answer(error).status)
            lines = (
                f"HTTP/1.1 {status.value} {status.phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
                "\r\n",
            )
            self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()

    # --- the time for a request ------------------------------------------------------------------

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.request_timeout_s, self._took_too_long)

    def _request_is_whole(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _took_too_long(self) -> None:
        self._deadline = None
        if self.pipeline:  # it is not read on while an answer is under way
            self._expect_request()
        elif not self.transport.is_closing():
            self._refuse(RequestTimeout(f"The request was not whole in {self.request_timeout_s:g} s."))

    # --- told by the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._expect_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if not self.parser.should_upgrade():
            self._request_is_whole()
            super().on_message_complete()
            if not self.pipeline:
                # uvicorn pauses a connection at 64 KiB of a body until it is taken, and what is paused never ends.
                self.flow.resume_reading()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """A server may ignore Upgrade (RFC 9110, 7.8), but httptools reads no body under it: once more without."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not served here."))
            return
        lines = [b"%s %s HTTP/1.1" % (method, self.url)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join((*lines, b"", rest)))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _Unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    # --- a client that ends its side -------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for an answer.

        The end of a client's side is all that is seen of one that left, too. One that reads skips an
        interim answer; from one that left the kernel brings a reset, which ends the request.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started:  # type: ignore[redundant-expr]
            return False
        if cycle.scope["http_version"] == "1.0":  # which knows no interim answers
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.loop.call_later(pause_s, self._probe, 2 * pause_s)


class _Unframed:
    """An answer for HTTP/1.0: what has no length ends with the connection, since chunks are unknown there."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self._cycle
        has_length = True

        async def send_unframed(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    # As uvicorn has it: a length that was told, and of which the last piece is the rest.
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif not has_length and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)
