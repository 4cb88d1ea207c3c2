"""From a prepared request to a response, streamed or whole; the same for both routes.

Until the first token (or the first keep-alive) every failure is an HTTP status; after that it is
an event, and the stream ends without a finish reason. A client that leaves ends its generation
at once, streamed or not, also while it waits for an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway import errors
from gateway.errors import ClientLeft, GatewayError
from gateway.measures import RequestMeasure
from gateway.replies import Reply
from gateway.service import service
from gateway.sse import KEEP_ALIVE, KEEP_ALIVE_S, EventStream, error_event
from gateway.stream import Delta, Generation, GenerationRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Makes the reply of a generation that has begun.
MakeReply = Callable[[Generation], Reply]


async def answer(request: Request, prepared: GenerationRequest, make_reply: MakeReply) -> Response:
    """The response. Raises the errors of `Dispatcher.start` and `Generation.next`, and ClientLeft."""
    shared = service(request)
    measure = shared.measures.request(prepared, request.state.arrived)
    generation = await unless_left(request.receive, shared.dispatcher.start(prepared))
    reply = make_reply(generation)
    try:
        if prepared.stream:
            return await _streamed(request, generation, reply, measure)
        return await _whole(request, generation, reply, measure)
    except BaseException:
        generation.abort()
        raise


async def _whole(request: Request, generation: Generation, reply: Reply, measure: RequestMeasure) -> Response:
    async def collect() -> list[Delta]:
        return [delta async for delta in generation]

    deltas = await unless_left(request.receive, collect())
    for delta in deltas:
        measure.ended(delta)
    measure.finish(generation)
    return Response(reply.whole(deltas), media_type="application/json")


async def _streamed(request: Request, generation: Generation, reply: Reply, measure: RequestMeasure) -> Response:
    async def first() -> Delta | None:
        try:
            return await asyncio.wait_for(generation.next(), KEEP_ALIVE_S)
        except TimeoutError:
            return None

    delta = await unless_left(request.receive, first())

    async def events() -> AsyncIterator[bytes]:
        try:
            if delta is None:
                yield KEEP_ALIVE
            else:
                measure.streamed(delta)
                yield reply.events(delta)
            async for later in generation:
                measure.streamed(later)
                if event := reply.events(later):
                    yield event
            yield reply.last_events()
        except GatewayError as error:
            yield _failed(request, error)
        except Exception:
            log.exception("stream_crashed", extra={"request_id": request.state.request_id})
            yield _failed(request, errors.INTERNAL)

    def end() -> None:
        generation.abort()
        measure.finish(generation)

    return EventStream(events(), end)


def _failed(request: Request, error: GatewayError) -> bytes:
    """The event of an error that came too late for a status."""
    service(request).measures.error(errors.answer(error).status)
    log.warning("stream_failed", extra={"request_id": request.state.request_id, "error": type(error).__name__})
    return error_event(errors.body(error))


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
