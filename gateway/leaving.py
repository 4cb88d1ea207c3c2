"""Work that ends with its client: nothing runs on for somebody who has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.errors import ClientLeft

T = TypeVar("T")


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first: ClientLeft is raised then."""
    working = asyncio.create_task(work, name="answer")
    leaving = asyncio.create_task(_left(receive), name="client-left")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("The client closed the connection.")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _left(receive: Receive) -> None:
    """Returns when the client has left; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
