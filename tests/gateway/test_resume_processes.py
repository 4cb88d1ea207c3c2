"""Resume over real engine processes that are killed, stopped and started again; the fake backend."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.engines import LinkSettings
from gateway.generation import Generation
from gateway.stream import Delta
from protocol.messages import Logprobs
from protocol.sampling import SamplingParams
from tests.gateway.scripted_engine import Gateway, Letters, linked, until
from tests.processes import Engine

FLAGS = ("fake", "--backend=fake", "--fake-step-ms=4")
SAMPLED = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)

#: What a client got of one choice: ids, text, logprobs, finish reason, stop reason.
Got = tuple[list[int], str, list[float], object, object]


@asynccontextmanager
async def gateway_to(*engines: Engine, cache_dir: Path, silence_s: float = 10.0) -> AsyncIterator[Gateway]:
    link = LinkSettings(silence_s=silence_s)
    async with linked(*(engine.address for engine in engines), cache_dir=cache_dir, link=link) as gateway:
        await until(lambda: len(list(gateway.router._offers())) == len(engines))
        yield gateway


async def start(gateway: Gateway, salt: str, **fields: Any) -> Generation:
    values = {"model": "fake", "sampling": SAMPLED, "decoder": Letters, "seed": 5, "salt": salt, "n": 3}
    return await gateway.start(range(40), **(values | fields))


async def read(generation: Generation, at: int = -1, then: Callable[[], None] = lambda: None) -> dict[int, Got]:
    """All that a generation gives; `then` is done when its first choice has `at` tokens."""
    deltas: dict[int, list[Delta]] = {}
    async with asyncio.timeout(50):
        async for delta in generation:
            deltas.setdefault(delta.index, []).append(delta)
            if delta.index == 0 and delta.num_generated >= at >= 0:
                then()
                at = -1
    assert at == -1, "it ended before"
    return {index: _joined(parts) for index, parts in deltas.items()}


def _joined(parts: list[Delta]) -> Got:
    rows = [part.logprobs for part in parts if isinstance(part.logprobs, Logprobs)]
    return (
        [token for part in parts for token in part.ids],
        "".join(part.text for part in parts),
        [value for row in rows for value in row.own],
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (*FLAGS, f"--fake-depth={request.param}")


async def test_kill_9_of_one_of_two_engines(
    start_engine: Callable[..., Engine], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    engines = [start_engine(*flags) for _ in range(2)]
    async with gateway_to(*engines, cache_dir=tmp_path) as gateway:
        undisturbed = await read(await start(gateway, "a"))
        assert [len(ids) for ids, *_ in undisturbed.values()] == [60, 60, 60]
        generation = await start(gateway, "b")
        victim = engines[_carrier_of(generation, gateway)]
        assert await read(generation, 20, victim.kill) == undisturbed
        assert gateway.resumes(exact=True) == 3


def _carrier_of(generation: Generation, gateway: Gateway) -> int:
    """Number of the engine that has the first choice."""
    placement: Any = generation.choices[0]._carrier
    return gateway.router._links.index(placement.seat.link)


async def test_kill_9_and_restart_at_the_same_address(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start_engine(*FLAGS)
    async with gateway_to(engine, cache_dir=tmp_path) as gateway:
        undisturbed = await read(await start(gateway, "a"))
        lives = [engine]

        def kill_and_restart() -> None:
            lives[-1].kill()
            lives.append(start_engine(*FLAGS, address=engine.address))

        for number, at in enumerate((0, 7, 59)):
            assert await read(await start(gateway, f"b{number}"), at, kill_and_restart) == undisturbed
        assert len(lives) == 4


async def test_a_stop_string_is_found_across_lives(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engines = [start_engine(*FLAGS) for _ in range(2)]
    async with gateway_to(*engines, cache_dir=tmp_path) as gateway:
        (_, text, *_), *_ = (await read(await start(gateway, "a", n=1))).values()
        stop = (text[18:26],)
        undisturbed = await read(await start(gateway, "b", n=1, stop=stop))
        generation = await start(gateway, "c", n=1, stop=stop)
        victim = engines[_carrier_of(generation, gateway)]
        assert await read(generation, 22, victim.kill) == undisturbed
        assert undisturbed[0][1] == text[: text.index(stop[0])]
        assert undisturbed[0][4] == stop[0]


async def test_a_stopped_engine_is_left_and_its_late_frames_reach_nobody(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engines = [start_engine(*FLAGS) for _ in range(2)]
    async with gateway_to(*engines, cache_dir=tmp_path, silence_s=0.8) as gateway:
        undisturbed = await read(await start(gateway, "a"))
        generation = await start(gateway, "b")
        victim = engines[_carrier_of(generation, gateway)]
        stopped = await read(generation, 20, lambda: os.kill(victim.pid, signal.SIGSTOP))
        assert stopped == undisturbed
        os.kill(victim.pid, signal.SIGCONT)
        await until(lambda: len(list(gateway.router._offers())) == 2)
        assert await read(await start(gateway, "c")) == undisturbed


async def test_sigterm_lets_streams_finish(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start_engine(*FLAGS)
    async with gateway_to(engine, cache_dir=tmp_path) as gateway:
        undisturbed = await read(await start(gateway, "a"))
        finished = await read(await start(gateway, "b"), 5, lambda: engine.signal(signal.SIGTERM))
        assert finished == undisturbed
        assert await asyncio.to_thread(engine.wait) == 0


async def test_many_choices_survive_a_kill(start_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engines = [start_engine(*FLAGS, "--max-num-seqs=64") for _ in range(2)]
    async with gateway_to(*engines, cache_dir=tmp_path) as gateway:
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        undisturbed = await read(await start(gateway, "a", n=128, sampling=sampling))
        victims = iter(engines)
        killed = await read(await start(gateway, "b", n=128, sampling=sampling), 10, lambda: next(victims).kill())
        assert killed == undisturbed
