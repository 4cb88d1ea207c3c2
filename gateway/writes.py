"""HTTP connections whose writes go out together, at the end of a turn of the event loop.

A step of an engine brings a token to each of hundreds of streams. Written between the work for one
stream and that for the next, every write wakes the reader, and the processor goes to and fro
between the code of Python and that of TCP: with 256 streams, 63 µs of processor time a token. The
work for all first and then all writes: 48 µs, and the client takes a third less as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.http1 import Http1Protocol
from gateway.sse import WRITER

#: Writes in one go, some 10 µs each, before other callbacks of the event loop get their turn.
_MOST = 256


class Turn:
    """The transports of one event loop that have something to write."""

    def __init__(self) -> None:
        self._waiting: deque[TurnTransport] = deque()

    def add(self, transport: TurnTransport, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._end, loop)
        self._waiting.append(transport)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        for _ in range(min(len(waiting), _MOST)):
            waiting.popleft().flush()
        if waiting:
            loop.call_soon(self._end, loop)


class TurnTransport(asyncio.Transport):
    """A transport that writes at the end of the turn; else the one that it is made of."""

    def __init__(self, transport: asyncio.Transport, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._turn = turn
        self._loop = loop
        self._unsent: list[bytes | bytearray | memoryview[Any]] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._unsent:
            self._turn.add(self, self._loop)
        self._unsent.append(data)

    def flush(self) -> None:
        """Hand over what is unsent; of a connection that is gone it is dropped."""
        unsent = self._unsent
        if unsent and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


class BodyWriter:
    """A `gateway.sse.Writer`: pieces of a response's body, in chunks but for HTTP/1.0.

    What uvicorn's `send` does with a piece, without a message and a coroutine for each.
    """

    __slots__ = ("_chunked", "_flow", "_transport")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport, *, chunked: bool) -> None:
        self._flow = flow
        self._transport = transport
        self._chunked = chunked

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def write(self, piece: bytes) -> None:
        assert piece, "an empty chunk is the end of the body"
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)

    async def drain(self) -> None:
        await self._flow.drain()


def batching_protocol(request_timeout_s: float) -> type[Http1Protocol]:
    """The protocol for the connections of one server."""
    turn = Turn()

    class BatchingProtocol(Http1Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.request_timeout_s = request_timeout_s
            super().connection_made(TurnTransport(transport, turn, self.loop))

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            chunked = cycle.scope["http_version"] != "1.0"
            writer = BodyWriter(self.flow, self.transport, chunked=chunked)
            cycle.scope["extensions"] = {WRITER: {"writer": writer}}
            super()._start_asgi_task(cycle, app)

    return BatchingProtocol
