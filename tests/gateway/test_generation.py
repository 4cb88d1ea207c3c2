"""Deltas pour without a task for each, wait for a client that does not read, and errors reach the reader."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import EngineFailed
from gateway.stream import Choice, Delta
from protocol.messages import FinishReason, u32
from tests.gateway.choices import one


class Gate:
    """An outlet that is opened and shut by the test."""

    def __init__(self) -> None:
        self.got: list[Delta] = []
        self.open = asyncio.Event()
        self.open.set()

    def put(self, choice: Choice) -> bool:
        if self.open.is_set():
            self.got.append(choice.take())
        return self.open.is_set()

    async def drain(self) -> None:
        await self.open.wait()


async def test_deltas_pour_as_they_come_and_merge_while_the_gate_is_full() -> None:
    generation, choice, _ = one()
    gate = Gate()
    got = gate.got
    choice.push(0, u32([0]))
    pouring = asyncio.create_task(generation.pour(gate))
    await asyncio.sleep(0)
    choice.push(1, u32([1]))
    choice.push(2, u32([2, 3]))
    assert [delta.text for delta in got] == ["a", "b", "cd"]
    gate.open.clear()
    for index in range(4, 8):
        choice.push(index, u32([index]))
        await asyncio.sleep(0)
    assert len(got) == 3
    gate.open.set()
    await asyncio.sleep(0.001)
    assert [delta.text for delta in got[3:]] == ["efgh"]
    choice.push(8, u32([8]))
    choice.finish(FinishReason.LENGTH, None)
    assert [(delta.text, delta.finish_reason) for delta in got[4:]] == [("i", None), ("", FinishReason.LENGTH)]
    await asyncio.wait_for(pouring, 1)
    assert [delta.num_generated for delta in got] == [1, 2, 4, 8, 9, 9]


async def test_pour_raises_what_failed_after_what_came_before() -> None:
    generation, choice, _ = one()
    gate = Gate()
    pouring = asyncio.create_task(generation.pour(gate))
    await asyncio.sleep(0)
    choice.push(0, u32([0]))
    choice.fail(EngineFailed("broken"))
    with pytest.raises(EngineFailed, match="broken"):
        await pouring
    assert [delta.text for delta in gate.got] == ["a"]


async def test_pour_raises_what_put_raises_and_who_brings_the_token_goes_on() -> None:
    class Broken(Gate):
        def put(self, choice: Choice) -> bool:
            raise ZeroDivisionError

    generation, choice, _ = one()
    pouring = asyncio.create_task(generation.pour(Broken()))
    await asyncio.sleep(0)
    choice.push(0, u32([0]))
    choice.push(1, u32([1]))
    with pytest.raises(ZeroDivisionError):
        await pouring


async def test_nothing_pours_for_a_reader_that_has_left() -> None:
    generation, choice, _ = one()
    gate = Gate()
    pouring = asyncio.create_task(generation.pour(gate))
    await asyncio.sleep(0)
    pouring.cancel()
    await asyncio.gather(pouring, return_exceptions=True)
    choice.push(0, u32([0]))
    assert gate.got == []


async def test_who_waits_for_a_bounded_time_is_told_whether_something_came() -> None:
    generation, choice, _ = one()
    assert not await generation.comes_within(0.01)
    waiting = asyncio.create_task(generation.comes_within(10))
    await asyncio.sleep(0)
    choice.push(0, u32([0]))
    assert await waiting
    assert await generation.comes_within(0)
    delta = await generation.next()
    assert delta is not None
    assert delta.text == "a"
    choice.finish(FinishReason.LENGTH, None)
    await generation.next()
    assert await generation.comes_within(10)  # the end is something to tell
