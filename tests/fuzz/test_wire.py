"""Damaged frames at a living engine and a living gateway, with honest work beside them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from protocol.codec import encode
from protocol.messages import GatewayBeat, Hello, Role, Step, u32
from tests.e2e.api import Api, assert_identical
from tests.engine.control import alone, submit
from tests.engine.peer import Peer
from tests.fuzz.frames import ENGINE_FRAMES, GATEWAY_FRAMES, damaged
from tests.gateway.scripted_engine import ScriptedEngine, until
from tests.processes import Engine, Process, Server

HELLO = encode(Hello((1, 0), Role.GATEWAY, "fuzz", "test"))
FRAMES_A_CONNECTION = 20


#: A process that has read all that was said to it is back at what it was, but for this much.
MAX_GROWN_MIB = 16
SETTLE_S = 30.0


def resident_mib(process: Process) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def settled_growth_mib(process: Process, before_mib: float) -> float:
    """How much its memory has grown once it is within the bound, or at the end of the patience with it."""
    deadline = time.monotonic() + SETTLE_S
    while (grown := resident_mib(process) - before_mib) >= MAX_GROWN_MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    return grown


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_an_engine_survives_what_is_said_to_it(start_engine: Callable[..., Engine], count: int) -> None:
    engine = start_engine("--backend=fake", "--fake-step-ms=15", "--fake-num-blocks=256")
    frames = damaged(count, GATEWAY_FRAMES)
    with zmq.Context() as context, Peer(context, engine.address) as honest:
        honest.greet()
        message = submit(1, max_tokens=500, temperature=1.0, seed=3)
        honest.say(message)
        honest.hear(Step)
        before = resident_mib(engine)
        for number in range(count // FRAMES_A_CONNECTION):
            honest.say(GatewayBeat(number))
            with Peer(context, engine.address) as peer:
                if number % 5:  # else the first frame of the connection is damaged too
                    peer.socket.send(HELLO)
                for frame in itertools.islice(frames, FRAMES_A_CONNECTION):
                    peer.socket.send(frame)
                peer.socket.setsockopt(zmq.LINGER, 1000)  # it is gone, but what it said goes out
        after = submit(2, b"after", max_tokens=5)
        honest.say(after)
        honest.finish(2)
        assert u32(honest.tokens(2)) == alone(after)
        honest.finish(1)
        assert u32(honest.tokens(1)) == alone(message)
        # A connection that is gone costs libzmq some 100 KiB until its last frame was read, and an engine that gets
        # less of a busy machine than its peers falls behind: by 50 MiB at the end of 1,000. Then it has to catch up.
        assert settled_growth_mib(engine, before) < MAX_GROWN_MIB
    assert engine.popen.poll() is None
    assert "Traceback" not in engine.output()


@pytest.mark.parametrize("count", [600, pytest.param(6_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
async def test_a_gateway_survives_what_is_said_to_it(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server], ipc_address: str, count: int
) -> None:
    engine = start_engine("--backend=fake", "--fake-step-ms=5")
    gateway = start_gateway(engine.address, ipc_address)
    await asyncio.to_thread(gateway.wait_until_ready)
    api = Api(gateway.url)
    body = {"model": "fake", "prompt": "honest", "max_tokens": 400, "seed": 3}
    expected = await asyncio.to_thread(api.answer, "/v1/completions", body)
    before = resident_mib(gateway)
    async with ScriptedEngine(ipc_address) as liar:
        await until(lambda: bool(liar.peers))
        answers = []
        for number, frame in enumerate(itertools.islice(damaged(count, ENGINE_FRAMES), count)):
            liar.say_frame(frame)
            await asyncio.sleep(0.002)
            if number % (count // 3) == 0:
                answers.append(asyncio.create_task(asyncio.to_thread(api.answer, "/v1/completions", body)))
        for answer in await asyncio.gather(*answers):
            assert_identical(expected, answer)
        assert len(liar.peers) > count // 10, "the lies were hardly heard"
    assert (await asyncio.to_thread(gateway.get, "/health"))[0] == 200
    assert await asyncio.to_thread(settled_growth_mib, gateway, before) < MAX_GROWN_MIB
    assert gateway.popen.poll() is None
    assert "Traceback" not in gateway.output()
