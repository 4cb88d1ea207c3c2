"""What surrounds every route, as plain ASGI: a middleware between a client and its handler that
hid the disconnect (as Starlette's BaseHTTPMiddleware does) would keep dead requests running.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import BodyTooLarge, GatewayError, Unauthorized
from gateway.measures import Measures

log = logging.getLogger(__name__)

#: Asked without a key, by things that have none.
OPEN_PATHS = frozenset({"/health", "/ready"})

#: Asked every few seconds by machines; logged only when debugging.
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestContext:
    """The outermost: a request's id, its arrival time, its line in the log, and its unforeseen errors."""

    def __init__(self, app: ASGIApp, measures: Measures) -> None:
        self._app = app
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        arrived = time.perf_counter()
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request_crashed", extra={"request_id": request_id, "path": scope["path"]})
            if status:
                raise  # the answer has begun: the server closes the connection
            await errors.response(errors.INTERNAL)(scope, receive, send_with_id)
        finally:
            if status >= 400:
                self._measures.error(status)
            log.log(
                logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "duration_ms": round((time.perf_counter() - arrived) * 1000, 1),
                },
            )


class ApiKey:
    """Everything but OPEN_PATHS takes `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = _header(scope, b"authorization")
            # Takes as long for a key that is right but for its last letter as for any other.
            if not hmac.compare_digest(given, self._expected):
                error = Unauthorized("The API key is missing or wrong; send it as `Authorization: Bearer KEY`.")
                await errors.response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body before it is parsed: by its announced length, else as soon as it is over."""

    def __init__(self, app: ASGIApp, limit: Callable[[], int], least: int) -> None:
        """Both in bytes. `limit` follows the longest context served; it is never below `least`."""
        self._app = app
        self._limit = limit
        self._least = least

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced) <= self._least:
            await self._app(scope, receive, send)  # the server reads no more of it than was announced
            return
        limit = self._limit()
        if announced.isdigit() and int(announced) > limit:
            await errors.response(_too_large(limit))(scope, receive, send)
            return
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise _too_large(limit)
            return message

        await self._app(scope, bounded_receive, send)


def _header(scope: Scope, name: bytes) -> bytes:
    """The first of this name, empty without one."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def _too_large(limit: int) -> GatewayError:
    return BodyTooLarge(f"The body is larger than {limit} bytes, the most that is read; send a shorter prompt.")
