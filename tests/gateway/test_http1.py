"""What clients send and uvicorn alone does not answer, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.http1 import Http1Protocol

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Echoes a body; `/pieces` in pieces without a length, `/wait` when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if message["type"] == "http.disconnect":
            self.left.set()
            return
        if scope["path"] == "/wait":
            self.waiting.set()
            leaving = asyncio.create_task(receive())
            going = asyncio.create_task(self.go.wait())
            await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            if leaving.done():
                self.left.set()
                return
            leaving.cancel()
        if scope["path"] == "/pieces":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (body, b"and", b"more"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected(app: App, request_timeout_s: float = 60.0) -> AsyncIterator[Connection]:
    config = uvicorn.Config(app, log_config=None)
    state = ServerState()

    def protocol() -> Http1Protocol:
        made = Http1Protocol(config=config, server_state=state, app_state={})
        made.request_timeout_s = request_timeout_s
        return made

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()
            for connection in list(state.connections):
                connection.transport.close()
            await asyncio.gather(*state.tasks)


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of an answer that ends with its connection."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    return head, body


POST = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"


@pytest.mark.parametrize("pieces", [(b"\r\nhello",), (b"\r", b"\n", b"he", b"llo"), (b"\r\nhe", b"llo")])
async def test_an_upgrade_is_not_taken_and_the_request_is_answered(pieces: tuple[bytes, ...]) -> None:
    head = POST % b"echo" + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    async with connected(App()) as (reader, writer):
        for piece in (head, *pieces):
            writer.write(piece)
            await asyncio.sleep(0.01)
        assert await reader.readuntil(b"hello") == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
        writer.write(POST % b"echo" + b"Connection: close\r\n\r\nagain")  # the connection is still good
        assert (await answer_of(reader))[1] == b"again"


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection() -> None:
    async with connected(App()) as (reader, writer):
        writer.write(b"POST /pieces HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello")
        head, body = await answer_of(reader)
    assert head.lower() == b"http/1.1 200 ok\r\nconnection: close"
    assert body == b"helloandmore"


async def test_a_client_that_ended_its_side_gets_its_answer() -> None:
    app = App()
    async with connected(app) as (reader, writer):
        writer.write(POST % b"wait" + b"\r\nhello")
        await app.waiting.wait()
        writer.write_eof()
        await asyncio.sleep(0.05)
        app.go.set()
        *interim, head, body = (await asyncio.wait_for(reader.read(), 10)).split(b"\r\n\r\n")
    assert set(interim) == {b"HTTP/1.1 100 Continue"}
    assert head == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close"
    assert body == b"hello"


async def test_a_client_that_left_while_it_waited_is_noticed() -> None:
    app = App()
    async with connected(app) as (_, writer):
        writer.write(POST % b"wait" + b"\r\nhello")
        await app.waiting.wait()
        writer.close()
        await asyncio.wait_for(app.left.wait(), 2.0)


@pytest.mark.parametrize("sent", [b"", b"POST /echo HT", POST % b"echo" + b"\r\nhe"])
async def test_a_request_that_does_not_come_whole_in_time_is_refused(sent: bytes) -> None:
    app = App()
    async with connected(app, request_timeout_s=0.1) as (reader, writer):
        writer.write(sent)
        head, body = await answer_of(reader)
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert app.left.is_set() == sent.endswith(b"he")


async def test_the_time_for_a_request_is_not_that_for_its_answer() -> None:
    app = App()
    async with connected(app, request_timeout_s=0.1) as (reader, writer):
        writer.write(POST % b"wait" + b"\r\nhello")
        await asyncio.sleep(0.3)
        app.go.set()
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"])
async def test_what_is_no_request_gets_an_error_body(sent: bytes) -> None:
    async with connected(App()) as (reader, writer):
        writer.write(sent)
        head, body = await answer_of(reader)
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
