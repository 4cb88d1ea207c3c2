"""From a prepared request to a response, streamed or whole; the same for both routes.

Until the first token (or the first keep-alive) every failure is an HTTP status; after that it is
an event, and the stream ends without a finish reason. A client that leaves ends its generation
at once, streamed or not, also while it waits for an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.client import Writer, client
from gateway.errors import GatewayError
from gateway.generation import Generation
from gateway.measures import RequestMeasure
from gateway.outlet import EventOutlet
from gateway.replies import Reply
from gateway.service import service
from gateway.sse import KEEP_ALIVE, KEEP_ALIVE_S, EventStream, error_event
from gateway.stream import Delta, GenerationRequest

log = logging.getLogger(__name__)

#: Logprobs that are written on the event loop (5 ms); more are in a thread. A request of 100 bytes can ask
#: for a million, which take 5 s.
INLINE_ENTRIES = 1000

#: Makes the reply of a generation that has begun.
MakeReply = Callable[[Generation], Reply]


async def answer(request: Request, prepared: GenerationRequest, make_reply: MakeReply) -> Response:
    """The response. Raises the errors of `Dispatcher.start` and `Generation.next`, and ClientLeft."""
    shared = service(request)
    generation = await client(request.scope).unless_left(shared.dispatcher.start(prepared, request.state.waited_s))
    measure = shared.measures.request(prepared, generation, request.state.arrived)
    reply = make_reply(generation)
    try:
        if prepared.stream:
            return await _streamed(request, generation, reply, measure)
        return await _whole(request, generation, reply, measure)
    except BaseException:
        generation.abort()
        measure.finish()
        raise


async def _whole(request: Request, generation: Generation, reply: Reply, measure: RequestMeasure) -> Response:
    async def collect() -> list[Delta]:
        deltas = []
        async for delta in generation:
            measure.ended(delta)
            deltas.append(delta)
        return deltas

    deltas = await client(request.scope).unless_left(collect())
    num_entries = sum(map(reply.num_entries, deltas))
    body = reply.whole(deltas) if num_entries <= INLINE_ENTRIES else await asyncio.to_thread(reply.whole, deltas)
    response = Response(body, media_type="application/json")
    measure.finish()
    return response


async def _streamed(request: Request, generation: Generation, reply: Reply, measure: RequestMeasure) -> Response:
    has_begun = await client(request.scope).unless_left(generation.comes_within(KEEP_ALIVE_S))
    delta = await generation.next() if has_begun else None

    async def produce(writer: Writer) -> None:
        async def send(delta: Delta) -> None:
            measure.streamed(delta)
            await writer.drain()
            if events := await _events(reply, delta):
                writer.write_body(events)

        try:
            if delta is None:
                writer.write_body(KEEP_ALIVE)
            else:
                await send(delta)
            if reply.echoes_logprobs:
                async for later in generation:
                    await send(later)
            else:
                await generation.pour(EventOutlet(reply, measure, writer))
            writer.write_body(reply.last_events())
        except GatewayError as error:
            writer.write_body(_failed(request, error))
        except Exception:
            log.exception("stream_crashed", extra={"request_id": request.state.request_id})
            writer.write_body(_failed(request, errors.INTERNAL))

    def end() -> None:
        generation.abort()
        measure.finish()

    return EventStream(produce, end)


async def _events(reply: Reply, delta: Delta) -> bytes:
    """The events of a delta that may have the logprobs of a long prompt."""
    if reply.num_entries(delta) <= INLINE_ENTRIES:
        return reply.events(delta)
    return await asyncio.to_thread(reply.events, delta)


def _failed(request: Request, error: GatewayError) -> bytes:
    """The event of an error that came too late for a status."""
    service(request).measures.error(errors.answer(error).status)
    log.warning("stream_failed", extra={"request_id": request.state.request_id, "error": type(error).__name__})
    return error_event(errors.body(error))
