"""Streams read with little more than a `recv` an event, so that the client takes next to nothing from what is measured.

A protocol, its callbacks and an event loop take 36 µs of processor time an event (`loadtest.transport`), as much as the
gateway on the same machine, and what waits for them counts as the gateway's delay. Here bytes are kept with the time at
which they were read, and taken apart when all streams have ended; until then only their end is looked for.
"""

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httptools

from loadtest.servers import TrialError

#: Longer than any stream is silent.
PATIENCE_S = 60.0

_READ_BYTES = 65536

#: What came of a response, with the time (`time.perf_counter`) of each read.
Reads = list[tuple[float, bytes]]


@dataclass(slots=True)
class Response:
    """A response's status, and the pieces of its body with the time at which each was read."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


class StreamClient:
    """Connections to one server, as many as there are requests at a time; used again until `close`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[_Connection] = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop().socket.close()

    def post(self, path: str, body: bytes, delays_s: Sequence[float]) -> list[Reads]:
        """Posts the JSON `body` after each of `delays_s` (ascending, from now on); all responses, read to their ends.

        Raises OSError where no connection can be made or one is reset, TrialError for a response that has no end or is
        not HTTP, or when nothing came for PATIENCE_S.
        """
        head = f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        began, collected = time.perf_counter(), list[Reads]()
        busy: dict[int, _Connection] = {}
        with select.epoll() as ready:
            try:
                while busy or len(collected) < len(delays_s):
                    has_begun_all = len(collected) == len(delays_s)
                    pause_s = PATIENCE_S
                    if not has_begun_all:
                        pause_s = max(0.0, began + delays_s[len(collected)] - time.perf_counter())
                    events = ready.poll(pause_s)
                    for number, _ in events:
                        if busy[number].read():
                            ready.unregister(number)
                            self._idle.append(busy.pop(number))
                    if not events and has_begun_all:
                        raise TrialError(f"{len(busy)} streams have said nothing for {PATIENCE_S:g} s")
                    if not has_begun_all and time.perf_counter() >= began + delays_s[len(collected)]:
                        connection = self._idle.pop() if self._idle else _Connection(self._address)
                        busy[connection.socket.fileno()] = connection
                        ready.register(connection.socket, select.EPOLLIN)
                        collected.append(connection.ask(request))
            finally:
                for connection in busy.values():
                    connection.socket.close()
        return collected


class _Connection:
    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reads: Reads = []
        self._end = _End()

    def ask(self, request: bytes) -> Reads:
        """What `read` will fill."""
        self._reads, self._end = [], _End()
        self.socket.sendall(request)
        return self._reads

    def read(self) -> bool:
        """Take what is there; whether it was the last of the response."""
        at, data = time.perf_counter(), self.socket.recv(_READ_BYTES)
        if not data:
            size = sum(len(data) for _, data in self._reads)
            raise TrialError(f"a connection was closed after {size} bytes of a response")
        self._reads.append((at, data))
        return self._end.is_in(data)


class _End:
    """Finds the end of a response; httptools without callbacks for what is between takes a microsecond an event."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_reached = False

    def on_message_complete(self) -> None:
        self._is_reached = True

    def is_in(self, data: bytes) -> bool:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise TrialError(f"a response is not HTTP/1.1: {error}") from error
        return self._is_reached


class _Parsing:
    """The callbacks of httptools for a response."""

    def __init__(self) -> None:
        self.response = Response()
        self._at = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, at: float, data: bytes) -> None:
        self._at = at
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.response.pieces.append((self._at, body))


def parse(reads: Reads) -> Response:
    """A whole response."""
    parsing = _Parsing()
    for at, data in reads:
        parsing.feed(at, data)
    return parsing.response
