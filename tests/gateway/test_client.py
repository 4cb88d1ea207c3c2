"""Work ends with the client it is for, and nothing else is taken for that."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gateway.client import Client, Writer, client
from gateway.errors import ClientLeft


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
