"""Streams read with little more than a `recv` an event, so that the client takes next to nothing from what is measured.

A protocol, a parser and an event loop's callback take 36 µs of processor time an event (`loadtest.transport`), as much
as the gateway on the same machine, and what waits for them counts as the gateway's delay. Here bytes are kept with the
time at which they were read, and parsed when all streams have ended.
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

#: What came over a connection until the server closed it, with the time (`time.perf_counter`) of each read.
Reads = list[tuple[float, bytes]]


@dataclass(slots=True)
class Response:
    """A response's status, and the pieces of its body with the time at which each was read."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


def post(host: str, port: int, path: str, body: bytes, delays_s: Sequence[float]) -> list[Reads]:
    """Posts the JSON `body` after each of `delays_s` (ascending, from now on) and reads all responses to their ends.

    Each has a connection of its own. Raises OSError where none can be made or one is reset, TrialError when nothing
    came for PATIENCE_S.
    """
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    address, request = (host, port), head.encode() + body
    reads: list[Reads] = [[] for _ in delays_s]
    open_now: dict[int, tuple[socket.socket, Reads]] = {}
    began, num_begun = time.perf_counter(), 0
    with select.epoll() as ready:
        try:
            while open_now or num_begun < len(delays_s):
                until_next = PATIENCE_S
                if num_begun < len(delays_s):
                    until_next = began + delays_s[num_begun] - time.perf_counter()
                    if until_next <= 0:
                        connection = _begin(address, request)
                        open_now[connection.fileno()] = connection, reads[num_begun]
                        ready.register(connection, select.EPOLLIN)
                        num_begun += 1
                        continue
                events = ready.poll(until_next)
                if not events and num_begun == len(delays_s):
                    raise TrialError(f"{len(open_now)} streams have said nothing for {PATIENCE_S:g} s")
                for number, _ in events:
                    connection, its_reads = open_now[number]
                    at, data = time.perf_counter(), connection.recv(_READ_BYTES)
                    if data:
                        its_reads.append((at, data))
                    else:
                        ready.unregister(number)
                        del open_now[number]
                        connection.close()
        finally:
            for connection, _ in open_now.values():
                connection.close()
    return reads


def _begin(address: tuple[str, int], request: bytes) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(request)
    return connection


class _Parsing:
    """The callbacks of httptools."""

    def __init__(self) -> None:
        self.response = Response()
        self.is_whole = False
        self._at = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, at: float, data: bytes) -> None:
        self._at = at
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.response.pieces.append((self._at, body))

    def on_message_complete(self) -> None:
        self.is_whole = True


def parse(reads: Reads) -> Response:
    """Raises TrialError for a response that is not whole."""
    parsing = _Parsing()
    try:
        for at, data in reads:
            parsing.feed(at, data)
    except httptools.HttpParserError as error:
        raise TrialError(f"a response is not HTTP/1.1: {error}") from error
    if not parsing.is_whole:
        raise TrialError(f"a connection was closed after {sum(len(data) for _, data in reads)} bytes of a response")
    return parsing.response
