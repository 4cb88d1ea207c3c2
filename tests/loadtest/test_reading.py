"""Bodies come back piece by piece with the times of their reads; a response that is not whole is no measurement."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from loadtest import reading
from loadtest.reading import StreamClient, parse
from loadtest.servers import TrialError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE_S = 0.2


@contextmanager
def serving(answer: Callable[[socket.socket, bytes], None], count: int = 1) -> Iterator[int]:
    """The port of a server that answers `count` connections at the same time."""

    def serve(connection: socket.socket) -> None:
        with connection:
            answer(connection, connection.recv(4096))

    def accept() -> None:
        for _ in range(count):
            thread = threading.Thread(target=serve, args=(listener.accept()[0],))
            thread.start()
            threads.append(thread)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield listener.getsockname()[1]
        for thread in threads:
            thread.join()


def test_pieces_have_the_times_of_their_reads() -> None:
    requests = []

    def answer(connection: socket.socket, request: bytes) -> None:
        requests.append((time.perf_counter(), request))
        connection.sendall(HEAD + b"3\r\none\r\n")
        time.sleep(PAUSE_S)
        connection.sendall(b"3\r\ntwo\r\n0\r\n\r\n")

    with serving(answer, count=2) as port:
        began = time.perf_counter()
        client = StreamClient("127.0.0.1", port)
        responses = list(map(parse, client.post("/path", b"{}", [0.0, PAUSE_S / 4])))
        client.close()
    assert [response.status for response in responses] == [200, 200]
    for response, (arrived, request) in zip(responses, sorted(requests), strict=True):
        assert request.startswith(b"POST /path HTTP/1.1\r\n")
        assert request.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")
        (first, one), (second, two) = response.pieces
        assert (one, two) == (b"one", b"two")
        assert arrived <= first <= second - 0.9 * PAUSE_S
    assert sorted(requests)[1][0] - began >= PAUSE_S / 4


def test_a_connection_is_used_again() -> None:
    def answer(connection: socket.socket, _: bytes) -> None:
        for text in (b"a", b"b"):
            connection.sendall(b"HTTP/1.1 503 Busy\r\ncontent-length: 1\r\n\r\n" + text)
            connection.recv(4096)

    with serving(answer) as port:
        client = StreamClient("127.0.0.1", port)
        responses = [parse(client.post("/", b"{}", [0.0])[0]) for _ in range(2)]
        client.close()
    assert [(response.status, [piece for _, piece in response.pieces]) for response in responses] == [
        (503, [b"a"]),
        (503, [b"b"]),
    ]


@pytest.mark.parametrize(
    ("said", "reason"),
    [(HEAD + b"3\r\none\r\n", f"closed after {len(HEAD) + 8} bytes"), (b"SMTP?\r\n\r\n", "not HTTP/1.1")],
)
def test_what_is_no_whole_response_is_said(said: bytes, reason: str) -> None:
    with serving(lambda connection, _: connection.sendall(said)) as port, pytest.raises(TrialError, match=reason):
        StreamClient("127.0.0.1", port).post("/", b"{}", [0.0])


def test_a_stream_that_stands_still_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 0.05)
    over = threading.Event()
    with serving(lambda _connection, _: over.wait(10) and None) as port:
        with pytest.raises(TrialError, match="1 streams have said nothing"):
            StreamClient("127.0.0.1", port).post("/", b"{}", [0.0])
        over.set()
