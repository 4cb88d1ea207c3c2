"""Most events are made without a Delta: the same bytes, measured alike, and nothing taken while the client is slow."""

from __future__ import annotations

import asyncio
from typing import cast

import orjson

from gateway.measures import RequestMeasure
from gateway.outlet import EventOutlet
from gateway.replies import Reply
from gateway.stream import Delta
from protocol.messages import FinishReason, u32
from tests.gateway.choices import one


class Replies:
    """A Reply whose events are lines."""

    def __init__(self) -> None:
        self.text_frames: list[tuple[bytes, bytes] | None] = [None]

    def events(self, delta: Delta) -> bytes:
        self.text_frames = [(b"text ", b";")]
        return b"delta %s;" % orjson.dumps(delta.text)


class Measure:
    """Measures and gaps of one."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gaps = self
        self.stopwatches = [7]

    def streamed(self, delta: Delta) -> None:
        self.seen.append(delta)

    def lap(self, stopwatch: int) -> None:
        self.seen.append(stopwatch)


class Client:
    def __init__(self) -> None:
        self.write_paused = False
        self.got: list[bytes] = []

    def write_body(self, piece: bytes, before: bytes = b"", after: bytes = b"") -> None:
        self.got.append(before + piece + after)

    async def drain(self) -> None:
        while self.write_paused:
            await asyncio.sleep(0)


async def test_events_with_no_more_than_text_are_put_between_bytes() -> None:
    generation, choice, _ = one()
    reply, measure, client = Replies(), Measure(), Client()
    frames = reply.text_frames
    outlet = EventOutlet(cast(Reply, reply), cast(RequestMeasure, measure), client)
    choice.push(0, u32([0]))
    assert outlet.put(choice)
    frames[0] = (b"text ", b";")
    choice.push(1, u32([1]))
    assert outlet.put(choice)
    client.write_paused = True
    choice.push(2, u32([2, 3]))
    assert not outlet.put(choice)
    client.write_paused = False
    choice.push(4, u32([4]))
    assert outlet.put(choice)
    choice.finish(FinishReason.LENGTH, None)
    assert outlet.put(choice)
    assert client.got == [b'delta "a";', b'text "b";', b'text "cde";', b'delta "";']
    first, last = Delta(0, "a", u32([0]), 1), Delta(0, "", u32([]), 5, finish_reason=FinishReason.LENGTH)
    assert measure.seen == [first, 7, 7, last]
    assert not generation.has_failed


async def test_an_event_with_text_alone_opens_the_tap_for_those_that_follow() -> None:
    generation, choice, _ = one()
    reply, measure, client = Replies(), Measure(), Client()
    reply.text_frames[0] = (b"text ", b";")
    pouring = asyncio.create_task(
        generation.pour(EventOutlet(cast(Reply, reply), cast(RequestMeasure, measure), client))
    )
    await asyncio.sleep(0)
    for index in range(3):
        choice.push(index, u32([index]))
    client.write_paused = True
    choice.push(3, u32([3]))
    assert client.got == [b'text "a";', b'text "b";', b'text "c";']
    assert measure.seen == [7, 7, 7]
    client.write_paused = False
    choice.push(4, u32([4]))
    await asyncio.sleep(0.001)
    choice.finish(FinishReason.LENGTH, None)
    await asyncio.wait_for(pouring, 1)
    assert client.got[3:] == [b'text "de";', b'delta "";']


async def test_the_tap_is_shut_when_nobody_pours_any_more() -> None:
    generation, choice, _ = one()
    reply, client = Replies(), Client()
    reply.text_frames[0] = (b"text ", b";")
    outlet = EventOutlet(cast(Reply, reply), cast(RequestMeasure, Measure()), client)
    pouring = asyncio.create_task(generation.pour(outlet))
    await asyncio.sleep(0)
    choice.push(0, u32([0]))
    choice.push(1, u32([1]))
    pouring.cancel()
    await asyncio.gather(pouring, return_exceptions=True)
    choice.push(2, u32([2]))
    assert client.got == [b'text "a";', b'text "b";']


async def test_a_token_without_text_is_delivered_without_an_event() -> None:
    _, choice, _ = one(stop=("bx",))
    measure, client = Measure(), Client()
    reply = Replies()
    reply.text_frames[0] = (b"text ", b";")
    outlet = EventOutlet(cast(Reply, reply), cast(RequestMeasure, measure), client)
    choice.push(0, u32([1]))
    assert outlet.put(choice)
    assert (client.got, measure.seen) == ([], [7])
    choice.push(1, u32([0]))
    assert outlet.put(choice)
    assert (client.got, measure.seen) == ([b'text "ba";'], [7, 7])
