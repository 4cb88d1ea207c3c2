"""Writes wait for the end of the turn, in order, and none is lost by a close."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import uvloop
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.writes import Turn, TurnTransport


class Wire(asyncio.Transport):
    """The transport below; all of one test write to the same log."""

    def __init__(self, name: str, log: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._name, self._log = name, log
        self.closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self}[name]

    def fileno(self) -> int:
        return -1

    def get_write_buffer_size(self) -> int:
        return 1  # so nothing may be written past it

    def write(self, data: Any) -> None:
        assert not self.closing
        self._log.append((self._name, bytes(data)))

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


def wires(count: int) -> tuple[list[tuple[str, bytes]], list[Wire], list[TurnTransport]]:
    log: list[tuple[str, bytes]] = []
    below = [Wire(str(number), log) for number in range(count)]
    turn, loop = Turn(), asyncio.get_running_loop()
    return log, below, [TurnTransport(wire, turn, loop) for wire in below]


async def test_writes_go_out_at_the_end_of_the_turn_joined_by_connection() -> None:
    log, _, (one, other) = wires(2)
    one.write(b"a")
    other.write(b"x")
    one.write(bytearray(b"b"))
    assert log == []
    await asyncio.sleep(0)
    assert log == [("0", b"ab"), ("1", b"x")]
    one.write(b"c")
    await asyncio.sleep(0)
    assert log[2:] == [("0", b"c")]


async def test_a_close_writes_first_and_a_lost_connection_drops_what_is_unsent() -> None:
    log, below, (closed, lost) = wires(2)
    closed.write(b"last")
    lost.write(b"nobody reads")
    closed.close()
    assert (log, below[0].closing) == ([("0", b"last")], True)
    below[1].closing = True
    await asyncio.sleep(0)
    assert log == [("0", b"last")]


async def test_other_callbacks_get_their_turn_between_many_writes() -> None:
    log, _, transports = wires(600)
    for transport in transports:
        transport.write(b"x")
    seen = []
    while len(log) < 600:
        await asyncio.sleep(0)
        seen.append(len(log))
    assert seen == [256, 512, 600]


async def test_pieces_are_http_chunks_and_wait_for_a_client_that_does_not_read() -> None:
    log, _, (writer,) = wires(1)
    writer.write_body(b"1", b"data: ", b"\n\n")
    writer.write_body(b"x" * 26)
    await asyncio.sleep(0)
    assert log == [("0", b"9\r\ndata: 1\n\n\r\n1a\r\n" + b"x" * 26 + b"\r\n")]
    writer.is_chunked = False
    writer.write_body(b"data: 2\n\n")
    await asyncio.sleep(0)
    assert log[1:] == [("0", b"data: 2\n\n")]
    writer.pause_writing()
    draining = asyncio.create_task(writer.drain())
    await asyncio.sleep(0)
    assert (writer.write_paused, draining.done()) == (True, False)
    writer.resume_writing()
    await asyncio.wait_for(draining, 1)
    assert not writer.write_paused


async def test_a_transport_is_all_that_uvicorn_asks_of_its_flow_control() -> None:
    _, _, (transport,) = wires(1)
    public = {name for name in dir(FlowControl(transport)) if not name.startswith("_")}
    assert public == {name for name in public if hasattr(transport, name)}


async def test_reading_is_paused_below_once_and_resumed_once() -> None:
    _, (below,), (transport,) = wires(1)
    seen: list[str] = []
    below.pause_reading = lambda: seen.append("pause")  # type: ignore[method-assign]
    below.resume_reading = lambda: seen.append("resume")  # type: ignore[method-assign]
    transport.resume_reading()
    transport.pause_reading()
    transport.pause_reading()
    transport.resume_reading()
    assert seen == ["pause", "resume"]


def test_connections_of_the_event_loop_send_small_writes_at_once() -> None:
    """Without TCP_NODELAY the second small write of an answer waits for an acknowledgement, some 40 ms."""

    async def is_set() -> bool:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[bool] = loop.create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted = transport.get_extra_info("socket")
                found.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
                transport.close()

        server = await loop.create_server(Accepted, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            answer = await found
            writer.close()
            await writer.wait_closed()
        return answer

    assert uvloop.run(is_set())


def test_a_client_that_stops_reading_gets_every_byte_in_order_and_one_that_left_is_told_of() -> None:
    """Small writes go to the socket at once, then the transport's buffer is in between, then they do again."""
    pieces = [bytes([number % 251]) * (1 + number * 37 % 3000) for number in range(3000)]

    async def exchange() -> tuple[bytes, int]:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[tuple[asyncio.Transport, asyncio.Future[None]]] = loop.create_future()
        turn = Turn()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                self.lost = loop.create_future()
                accepted.set_result((cast(asyncio.Transport, transport), self.lost))

            def connection_lost(self, exc: Exception | None) -> None:
                self.lost.set_result(None)

        server = await loop.create_server(Accepted, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1024)
            below, lost = await accepted
            transport = TurnTransport(below, turn, loop)
            most = 0
            for piece in pieces:
                transport.write(piece)
                await asyncio.sleep(0)
                most = max(most, below.get_write_buffer_size())
            got = await reader.readexactly(sum(map(len, pieces)))
            transport.write(b"again")
            got += await reader.readexactly(5)
            writer.transport.abort()
            while not lost.done():
                transport.write(b"nobody reads")
                await asyncio.sleep(0.001)
        return got, most

    got, most = uvloop.run(asyncio.wait_for(exchange(), 10))
    assert got == b"".join(pieces) + b"again"
    assert most > 100_000  # else the way past the transport was the only one
