"""Links over real sockets to an engine that the test plays: lives, silence, and the hung rule."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.engines import EngineLink, LinkSettings, LinkState
from protocol.codec import encode
from protocol.messages import (
    Abort,
    AbortReason,
    GatewayBeat,
    Hello,
    Phase,
    Reject,
    RejectCode,
    Submit,
    Welcome,
)
from tests.gateway.scripted_engine import BEAT_S, IDLE, SERVING, Gateway, ScriptedEngine, linked, next_delta, until


def only_link(gateway: Gateway) -> EngineLink:
    (link,) = gateway.router._links
    return link


async def test_loading_then_serving(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, serving=None) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        link = only_link(gateway)
        assert link.state in (LinkState.DOWN, LinkState.CONNECTING)
        hello = await engine.next(Hello)
        assert len(hello.name) <= 64
        await until(lambda: link.state is LinkState.LOADING)
        assert not gateway.router.ready
        await engine.next(GatewayBeat)
        engine.serving, engine.beat = SERVING, IDLE
        engine.welcome()
        await until(lambda: gateway.router.ready)
        assert link.state is LinkState.SERVING
        engine.beat = replace(IDLE, phase=Phase.DRAINING)
        await until(lambda: link.state is LinkState.DRAINING)
        assert not gateway.router.ready


async def test_the_gateway_may_be_there_first_and_outlives_engines(ipc_address: str, tmp_path: Path) -> None:
    async with linked(ipc_address, cache_dir=tmp_path) as gateway:
        for _ in range(5):
            async with ScriptedEngine(ipc_address) as engine:
                await until(lambda: gateway.router.ready)
                assert len(engine.peers) == 1
                await engine.next(Hello)
                await engine.die()
                await until(lambda: not gateway.router.ready)


async def test_over_tcp(tmp_path: Path) -> None:
    async with ScriptedEngine("tcp://127.0.0.1:*") as engine:
        address = engine.bound_address
        async with linked(address, cache_dir=tmp_path) as gateway:
            generation = await gateway.start([5, 6])
            submit = await engine.next(Submit)
            assert list(submit.prompt_ids) == [5, 6]
            engine.say_step({submit.handle: (0, [7])})
            assert (await next_delta(generation)).text == "h"


async def test_a_silent_engine_is_left_and_joined_again(ipc_address: str, tmp_path: Path) -> None:
    link = LinkSettings(beat_s=BEAT_S, silence_s=0.5)
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path, link=link) as gateway:
        await gateway.start()
        engine.beats = False
        await until(lambda: not gateway.router.ready)
        assert only_link(gateway).state is LinkState.HUNG
        assert len(engine.peers) == 1, "it is left only later"
        engine.beats = True
        await until(lambda: gateway.router.ready)
        engine.beats = False
        await until(lambda: len(engine.peers) == 2)
        await engine.next(Hello)
        assert await engine.next(Hello)


async def test_a_gateway_that_stood_still_does_not_call_the_engine_silent(ipc_address: str, tmp_path: Path) -> None:
    link = LinkSettings(beat_s=BEAT_S, silence_s=0.5)
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path, link=link) as gateway:
        await until(lambda: gateway.router.ready)
        time.sleep(1.2)  # noqa: ASYNC251 - as by SIGSTOP
        sequence = only_link(gateway).connection
        await engine.next(GatewayBeat)
        await engine.next(GatewayBeat)
        assert only_link(gateway).connection is sequence
        assert len(engine.peers) == 1


async def test_what_breaks_the_protocol_is_left_for_a_new_connection(ipc_address: str, tmp_path: Path) -> None:
    frames = (
        b"\x08nonsense",
        encode(Reject(RejectCode.ACCOUNT_LOST, "read nothing for 5 s")),
        encode(Abort(1, AbortReason.CLIENT)),
    )
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        for number, frame in enumerate(frames, 1):
            await until(lambda: gateway.router.ready)
            engine.say_frame(frame)
            await until(lambda number=number: len(engine.peers) == number + 1)  # type: ignore[misc]


async def test_an_engine_of_another_major_version_is_tried_ever_less_often(ipc_address: str, tmp_path: Path) -> None:
    async with (
        ScriptedEngine(ipc_address, greets=False) as engine,
        linked(ipc_address, cache_dir=tmp_path) as gateway,
    ):
        times = []
        for _ in range(3):
            await engine.next(Hello)
            times.append(time.monotonic())
            engine.say(Welcome((2, 0), "future", 1, Phase.SERVING, SERVING))
        assert not gateway.router.ready
        assert times[1] - times[0] >= 0.25
        assert times[2] - times[1] >= 0.5


HANGING = replace(IDLE, step=5, running=1, longest_step_ms=100)


async def test_hung_is_by_steps_that_do_not_end(ipc_address: str, tmp_path: Path) -> None:
    link = LinkSettings(beat_s=BEAT_S, hang_timeout_s=0.5)
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path, link=link) as gateway:
        state = only_link(gateway)

        async def after(**fields: object) -> LinkState:
            engine.beat = replace(HANGING, **fields)  # type: ignore[arg-type]
            await until(lambda: _beat(state) == engine.beat)
            return state.state

        await until(lambda: gateway.router.ready)
        assert await after(step_age_ms=800) is LinkState.SERVING  # 8 times the longest step
        assert await after(step_age_ms=801) is LinkState.HUNG
        assert not gateway.router.ready
        assert await after(step_age_ms=801, running=0) is LinkState.SERVING
        assert await after(step_age_ms=500, longest_step_ms=1) is LinkState.SERVING  # the timeout
        assert await after(step_age_ms=501, longest_step_ms=1) is LinkState.HUNG
        assert len(engine.peers) == 1, "nothing was there to be moved"


def _beat(link: EngineLink) -> object:
    beat = link.connection.beat if link.connection else None
    return beat and replace(beat, seq=0)


async def test_the_streams_of_a_hung_engine_are_moved_and_it_gets_none_until_it_wakes(
    short_dir: Path, tmp_path: Path
) -> None:
    first, second = (f"ipc://{short_dir}/{number}.sock" for number in range(2))
    async with ScriptedEngine(first) as hanging, linked(first, second, cache_dir=tmp_path) as gateway:
        generation = await gateway.start()
        submit = await hanging.next(Submit)
        hanging.say_step({submit.handle: (0, [0, 1])})
        assert (await next_delta(generation)).text == "ab"
        hanging.beat = replace(HANGING, step_age_ms=20_000)
        async with ScriptedEngine(second) as healthy:
            resumed = await healthy.next(Submit)
            assert (resumed.resume, list(resumed.generated_ids)) == (True, [0, 1])
            # It wakes and goes on with what it had; nobody listens.
            hanging.say_frame_to(hanging.peers[0], hanging.step_frame({submit.handle: (2, [9])}))
            healthy.say_step({resumed.handle: (2, [2])})
            assert (await next_delta(generation)).text == "c"
            assert hanging.heard(Submit) == 0
            await until(lambda: gateway.router._links[0].state is LinkState.HUNG)
            hanging.beat = IDLE
            await until(lambda: gateway.router._links[0].state is LinkState.SERVING)


async def test_a_stopped_engine_with_work_is_left_after_the_hang_timeout(ipc_address: str, tmp_path: Path) -> None:
    link = LinkSettings(beat_s=BEAT_S, hang_timeout_s=0.6, silence_s=60)
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path, link=link) as gateway:
        await until(lambda: gateway.router.ready)
        engine.beats = False
        await asyncio.sleep(0.8)
        assert len(engine.peers) == 1, "without work silence is borne for longer"
        engine.beats = True
        generation = await gateway.start()
        submit = await engine.next(Submit)
        engine.say_step({submit.handle: (0, [0])})
        assert (await next_delta(generation)).text == "a"
        stopped = time.monotonic()
        engine.beats = False
        await until(lambda: len(engine.peers) == 2)
        assert 0.55 < time.monotonic() - stopped < 2  # from its last beat on
        engine.beats = True
        resumed = await engine.next(Submit)
        assert (resumed.resume, list(resumed.generated_ids)) == (True, [0])


async def test_a_hung_engine_gets_no_work_between_welcome_and_its_first_beat(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await gateway.start()
        await engine.next(Submit)
        engine.beat = replace(HANGING, step_age_ms=20_000)
        await until(lambda: only_link(gateway).state is LinkState.HUNG)
        engine.beats = False
        await until(lambda: len(engine.peers) == 2)
        await engine.next(GatewayBeat)
        await engine.next(GatewayBeat)
        assert only_link(gateway).state in (LinkState.CONNECTING, LinkState.HUNG)
        assert engine.heard(Submit) == 0


async def test_an_engine_that_takes_no_frames_is_left(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await until(lambda: gateway.router.ready)
        connection = only_link(gateway).connection
        assert connection is not None
        connection._send_frame = lambda _: False
        await gateway.start()
        assert (await engine.next(Submit)).resume
        assert len(engine.peers) == 2


async def test_one_engine_is_moved_a_second(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    async with (
        ScriptedEngine(addresses[0]) as one,
        ScriptedEngine(addresses[1]) as other,
        linked(*addresses, cache_dir=tmp_path) as gateway,
    ):
        await until(lambda: len(gateway.router._links) == 2 and all(link.serving for link in gateway.router._links))
        for _ in range(2):
            await gateway.start()
        await one.next(Submit)
        await other.next(Submit)
        one.beat = other.beat = replace(HANGING, step_age_ms=20_000)
        await until(lambda: len(one.peers) + len(other.peers) == 3)
        began = time.monotonic()
        await until(lambda: len(one.peers) + len(other.peers) == 4)
        assert time.monotonic() - began >= 0.9


async def test_a_fault_of_our_own_is_told_loudly(
    ipc_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await until(lambda: gateway.router.ready)

        def fail() -> None:
            raise RuntimeError("a fault of our own")

        monkeypatch.setattr(gateway.router, "_offers", fail)
        await until(lambda: bool(gateway.crashes))
        monkeypatch.undo()
        gateway.crashes.clear()
        assert len(engine.peers) == 1
