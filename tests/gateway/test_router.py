"""Models, credit and the line for it, and the way of a tokenizer bundle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.dealer import AddressError
from gateway.errors import ModelNotFound, Overloaded, Unavailable
from gateway.router import Router, RouterSettings, Seat
from protocol import metrics
from protocol.messages import BundlePart, BundleRequest, Phase, Submit
from tests.gateway.scripted_engine import (
    BUNDLE,
    IDLE,
    SERVING,
    Gateway,
    ScriptedEngine,
    linked,
    until,
    with_grants,
)

SMALL = replace(SERVING, grant_requests=2, grant_tokens=100)


def router_for(*addresses: str, **settings: Any) -> Router:
    instruments = metrics.build(metrics.Owner.GATEWAY, CollectorRegistry())
    return Router(RouterSettings(addresses, Path("cache"), **settings), instruments)


async def test_models_and_what_is_said_of_those_that_are_not_there(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(3)]
    async with linked(*addresses, cache_dir=tmp_path) as gateway:
        router = gateway.router
        with pytest.raises(Unavailable, match="no engine serves the model 'a'"):
            router.serving("a")
        with pytest.raises(Unavailable, match="no engine serves a model"):
            router.serving("")  # a request need not name one
        assert not router.ready
        assert router.models() == []
        one = ScriptedEngine(addresses[0], replace(SERVING, model="b"))
        two = ScriptedEngine(addresses[1], replace(SERVING, model="a"))
        async with one, two:
            await until(lambda: len(router.models()) == 2)
            assert [each.model for each in router.models()] == ["a", "b"]
            assert router.serving("a").model == "a"
            with pytest.raises(ModelNotFound, match="'c' does not exist; this server has a, b") as raised:
                router.serving("c")
            assert raised.value.param == "model"
            assert gateway.registry.get_sample_value("sluicegate:engines_serving") == 2
            async with ScriptedEngine(addresses[2], serving=None) as loading:
                await until(lambda: bool(loading.peers))
                await until(lambda: _raises(router, "c", Unavailable))  # it may be the one that loads
            await two.die()
            await until(lambda: _raises(router, "a", Unavailable))  # known, but gone


def _raises(router: Router, model: str, kind: type[Exception]) -> bool:
    try:
        router.serving(model)
    except (ModelNotFound, Unavailable) as error:
        return type(error) is kind
    return False


def test_addresses_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="name at least one"):
        router_for()
    with pytest.raises(AddressError, match="tcp://HOST:PORT"):
        router_for("localhost")
    with pytest.raises(AddressError, match=r"10\.0\.0\.1:5557 leaves this machine, which takes CURVE keys"):
        router_for("ipc:///tmp/a", "tcp://10.0.0.1:5557")
    with pytest.raises(AddressError, match="cannot be read"):
        router_for("tcp://10.0.0.1:5557", curve_secret_key_file=tmp_path / "a", curve_server_key_file=tmp_path / "b")


async def acquire(gateway: Gateway, num_prompt: int = 1, **options: Any) -> Seat:
    await until(lambda: gateway.router.ready)
    return await gateway.router.acquire("model", num_prompt, **({"wait_s": 5.0} | options))


def release(seat: Seat) -> None:
    seat.connection.release(seat.handle)


async def in_line(gateway: Gateway, num_waiting: int) -> None:
    await until(lambda: sum(len(line) for line in gateway.router._lines.values()) == num_waiting)


async def test_seats_are_given_in_the_order_asked_for(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, SMALL), linked(ipc_address, cache_dir=tmp_path) as gateway:
        first, second = await acquire(gateway), await acquire(gateway)
        order: list[int] = []

        async def wait(number: int, num_prompt: int) -> None:
            seat = await acquire(gateway, num_prompt)
            order.append(number)
            release(seat)

        async with asyncio.TaskGroup() as tasks:
            for number, num_prompt in enumerate((100, 1, 50)):
                tasks.create_task(wait(number, num_prompt))
                await in_line(gateway, number + 1)
            release(first)
            await asyncio.sleep(0.02)
            assert order == [], "the next needs more prompt tokens than are left, and is not overtaken"
            release(second)
        assert order == [0, 1, 2]
        assert gateway.router._lines == {}


async def test_no_room_is_a_429_after_a_bounded_wait(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, SMALL), linked(ipc_address, cache_dir=tmp_path) as gateway:
        seats = [await acquire(gateway), await acquire(gateway)]
        with pytest.raises(Overloaded, match=r"every engine that serves 'model' is busy; no room came in 0\.05 s"):
            await acquire(gateway, wait_s=0.05)
        assert gateway.router._lines == {}
        patient = asyncio.create_task(acquire(gateway, wait_s=0.02, patient=True))
        await asyncio.sleep(0.1)
        release(seats.pop())
        seats.append(await patient)
        for seat in seats:
            release(seat)


async def test_who_leaves_the_line_lets_the_others_pass(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, SMALL), linked(ipc_address, cache_dir=tmp_path) as gateway:
        first, second = await acquire(gateway), await acquire(gateway)
        leaving, staying = (asyncio.create_task(acquire(gateway)) for _ in range(2))
        await in_line(gateway, 2)
        # The seat comes in the same moment as the cancellation: it goes to the next.
        release(first)
        leaving.cancel()
        seat = await staying
        assert leaving.cancelled()
        release(seat)
        release(second)
        assert seat.connection.credit.requests == 0


async def test_the_patient_do_not_wait_for_ever_without_an_engine(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, SMALL) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await acquire(gateway)
        await acquire(gateway)
        waiting = asyncio.create_task(acquire(gateway, wait_s=0.1, patient=True))
        await in_line(gateway, 1)
        await engine.die()
        with pytest.raises(Unavailable):
            await waiting


async def test_a_model_that_was_served_is_waited_for(ipc_address: str, tmp_path: Path) -> None:
    async with linked(ipc_address, cache_dir=tmp_path) as gateway:
        router = gateway.router
        with pytest.raises(Unavailable):
            await router.await_serving("model", 5.0)  # it never was: at once
        async with ScriptedEngine(ipc_address):
            await until(lambda: router.ready)
        await until(lambda: not router.ready)
        assert router.model_names() == ["model"]
        assert router.last_serving("model") == SERVING
        with pytest.raises(Unavailable):
            await router.await_serving("model", 0.05)
        with pytest.raises(Unavailable):
            await router.acquire("model", 1, wait_s=0.05)
        serving = asyncio.create_task(router.await_serving("model", 5.0))
        seat = asyncio.create_task(router.acquire("model", 1, wait_s=5.0))
        async with ScriptedEngine(ipc_address):
            assert await serving == SERVING
            release(await seat)
        await until(lambda: not router.ready)
        async with ScriptedEngine(ipc_address, replace(SERVING, model="other")):
            await until(lambda: router.ready)
            with pytest.raises(Unavailable):
                await router.await_serving("model", 5.0)  # every link has something else to serve: at once
        await until(lambda: not router.ready)
        stopped = asyncio.create_task(router.await_serving("model", 5.0))
        await asyncio.sleep(0)
        router.dismiss_waiting(Unavailable("stopping"))
        with pytest.raises(Unavailable, match="stopping"):
            await stopped


async def test_a_raised_grant_is_given_out(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address, SMALL) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        for _ in range(2):
            await acquire(gateway)
        waiting = asyncio.create_task(acquire(gateway))
        await in_line(gateway, 1)
        engine.beat = with_grants(IDLE, replace(SMALL, grant_requests=3))
        assert (await waiting).serving == SMALL


async def handles(gateway: Gateway, loads: Sequence[int], engines: Sequence[ScriptedEngine]) -> list[int]:
    """Link numbers of three seats when engines say that they run so many requests."""
    for engine, load in zip(engines, loads, strict=True):
        engine.beat = replace(IDLE, running=load)
    links = gateway.router._links
    await until(lambda: [link.load * SERVING.max_num_seqs for link in links] == list(loads))
    seats = [await acquire(gateway) for _ in range(3)]
    numbers = [links.index(seat.link) for seat in seats]
    for seat in seats:
        release(seat)
    return numbers


async def test_the_least_busy_engine_is_taken(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    engines = [ScriptedEngine(address) for address in addresses]
    async with engines[0], engines[1], linked(*addresses, cache_dir=tmp_path) as gateway:
        await until(lambda: len(list(gateway.router._offers())) == 2)
        assert await handles(gateway, [5, 1], engines) == [1, 1, 1]
        assert await handles(gateway, [0, 5], engines) == [0, 0, 0]
        links = gateway.router._links
        near = await acquire(gateway, near=links[1])
        assert near.link is links[1]
        engines[0].beat = replace(IDLE, phase=Phase.DRAINING)
        await until(lambda: links[0].serving is None)
        assert (await acquire(gateway, near=links[0])).link is links[1]


async def test_a_bundle_is_fetched_once_and_then_read_from_disk(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await until(lambda: gateway.router.ready)
        fetch = asyncio.create_task(gateway.router.fetch_bundle(SERVING.bundle))
        assert (await engine.next(BundleRequest)).sha256 == SERVING.bundle
        engine.say(BundlePart(SERVING.bundle, 0, len(BUNDLE), BUNDLE))
        assert await fetch == BUNDLE
        assert await gateway.router.fetch_bundle(SERVING.bundle) == BUNDLE
        assert engine.heard(BundleRequest) == 0


async def test_a_wrong_or_lost_bundle_is_asked_of_the_next_engine(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(3)]
    engines = [ScriptedEngine(address) for address in addresses]
    async with engines[0], engines[1], engines[2], linked(*addresses, cache_dir=tmp_path) as gateway:
        await until(lambda: len(list(gateway.router._offers())) == 3)
        fetch = asyncio.create_task(gateway.router.fetch_bundle(SERVING.bundle))
        await engines[0].next(BundleRequest)
        engines[0].say(BundlePart(SERVING.bundle, 0, len(BUNDLE), BUNDLE[::-1]))
        await engines[1].next(BundleRequest)
        await engines[1].die()
        await engines[2].next(BundleRequest)
        engines[2].say(BundlePart(SERVING.bundle, 0, len(BUNDLE), BUNDLE))
        assert await fetch == BUNDLE


async def test_a_bundle_that_nobody_has(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await until(lambda: gateway.router.ready)
        with pytest.raises(Unavailable, match="tokenizer"):
            await gateway.router.fetch_bundle("0" * 64)
        assert engine.heard(BundleRequest) == 0
        assert engine.heard(Submit) == 0
