"""Work ends with the client it is for, and nothing else is taken for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.client import Client, Writer, client
from gateway.errors import ClientLeft
from gateway.writes import batching_protocol


def somebody() -> Client:
    return Client(cast(Writer, None))


async def _value() -> int:
    await asyncio.sleep(0)
    return 7


async def test_the_result_of_work_that_its_client_waited_for() -> None:
    waiting = somebody()
    assert [await waiting.unless_left(_value()) for _ in range(2)] == [7, 7]
    waiting.left()
    await asyncio.sleep(0)  # what follows the work is not cancelled


async def test_work_is_cancelled_when_its_client_leaves_and_none_begins_after() -> None:
    leaving = somebody()
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    asyncio.get_running_loop().call_soon(leaving.left)
    with pytest.raises(ClientLeft):
        await leaving.unless_left(work())
    assert ended == [1]
    with pytest.raises(ClientLeft):
        await leaving.unless_left(work())
    assert ended == [1]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_of_the_request_itself_stays_one() -> None:
    leaving = somebody()
    request = asyncio.create_task(leaving.unless_left(asyncio.Event().wait()))
    await asyncio.sleep(0)
    request.cancel()
    leaving.left()
    with pytest.raises(asyncio.CancelledError):
        await request


def test_it_is_found_in_the_scope_that_the_server_makes() -> None:
    asking = somebody()
    assert client({"extensions": asking.extensions()}) is asking


@pytest.mark.parametrize("body_bytes", [0, 1_000, 200_000])
@pytest.mark.parametrize("loop_of", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_server_tells_of_a_client_that_left_after_a_body(body_bytes: int, loop_of: Callable[..., object]) -> None:
    """Also of one larger than uvicorn reads ahead (64 KiB), which comes in one piece after its head."""
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        with pytest.raises(ClientLeft):
            await client(scope).unless_left(asyncio.sleep(60))
        ended.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def exchange() -> None:
        state, config = ServerState(), uvicorn.Config(app, log_config=None)
        protocol = batching_protocol(60.0)
        loop = asyncio.get_running_loop()
        made = partial(protocol, config=config, server_state=state, app_state={})
        async with await loop.create_server(made, "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % body_bytes)
            await asyncio.sleep(0.05)
            writer.write(b"x" * body_bytes)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
            async with asyncio.timeout(5):
                while not ended:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*state.tasks)

    loop_of(exchange())
    assert ended == ["/a"]


def test_the_server_has_what_offers_a_client() -> None:
    """A method of uvicorn's that is not part of its interface: a version without it would lose every request."""
    assert "_start_asgi_task" in vars(HttpToolsProtocol)
