"""Choices that lose their engine, over real sockets to engines that the test plays."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import EngineFailed, Overloaded, Unavailable
from gateway.generation import Generation
from gateway.resume import DispatchSettings
from protocol.codec import encode
from protocol.messages import Abort, ErrorCode, FinishReason, Logprobs, Phase, Reject, RejectCode, Submit, f32, u32
from protocol.sampling import SamplingParams
from tests.gateway.scripted_engine import (
    EOS,
    IDLE,
    SERVING,
    Gateway,
    ScriptedEngine,
    linked,
    next_delta,
    read_all,
    request,
    until,
)

SAME_MODEL = replace(SERVING, numerics="other numerics")
BROKEN = b"\x08nonsense"  # a Step that is none: the link is closed
QUICK = DispatchSettings(resume_timeout_s=0.3, credit_wait_s=0.3)


async def started(gateway: Gateway, engine: ScriptedEngine, ids: list[int], **fields: Any) -> tuple[Generation, int]:
    """A generation that got and read `ids`, and its handle."""
    generation = await gateway.start(**fields)
    submit = await engine.next(Submit)
    engine.say_admitted(submit.handle, cached_tokens=1)
    if ids:
        engine.say_step({submit.handle: (0, ids)})
        assert list((await next_delta(generation)).ids) == ids
    return generation, submit.handle


async def test_a_choice_goes_on_with_the_next_life_of_its_engine(ipc_address: str, tmp_path: Path) -> None:
    async with linked(ipc_address, cache_dir=tmp_path) as gateway:
        async with ScriptedEngine(ipc_address) as engine:
            generation, _ = await started(gateway, engine, [0, 1], sampling=SamplingParams(max_tokens=4), salt="s")
            await engine.die()
        async with ScriptedEngine(ipc_address) as engine:
            submit = await engine.next(Submit)
            assert (submit.resume, submit.group, submit.leader) == (True, None, False)
            assert (list(submit.prompt_ids), list(submit.generated_ids)) == ([1, 2, 3], [0, 1])
            assert (submit.sampling.max_tokens, submit.salt) == (4, "s")
            engine.say_admitted(submit.handle, cached_tokens=3)
            engine.say_step({submit.handle: (2, [2])})
            engine.say_step({submit.handle: (3, [3])})
            engine.say_finished(submit.handle, num_generated=4)
            text, ids, last = (await read_all(generation))[0]
            assert (text, ids, last.num_generated, last.finish_reason) == ("cd", [2, 3], 4, FinishReason.LENGTH)
            assert generation.choices[0].cached_tokens == 1, "as the first engine said"
            assert gateway.resumes(exact=True) == 1


async def test_the_seed_of_a_resumed_choice_is_its_own(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    async with ScriptedEngine(addresses[0]) as one, linked(*addresses, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=2, seed=None)
        before = [await one.next(Submit) for _ in range(2)]
        async with ScriptedEngine(addresses[1]) as other:
            await one.die()
            after = [await other.next(Submit) for _ in range(2)]
            assert [submit.seed for submit in after] == [submit.seed for submit in before]
        generation.abort()


async def test_a_gap_fails_the_link_and_the_choice_gets_the_right_ids(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, handle = await started(gateway, engine, [0, 1])
        engine.say_step({handle: (3, [9])})
        submit = await engine.next(Submit)
        assert list(submit.generated_ids) == [0, 1]
        assert len(engine.peers) == 2
        engine.say_step({submit.handle: (1, [1, 2])})  # a repeat among them
        engine.say_finished(submit.handle, num_generated=3)
        text, ids, _ = (await read_all(generation))[0]
        assert (text, ids) == ("c", [2])


async def test_tokens_that_are_missing_at_the_end_are_a_gap(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        _, handle = await started(gateway, engine, [0, 1])
        engine.say_finished(handle, num_generated=3)
        assert list((await engine.next(Submit)).generated_ids) == [0, 1]


async def test_an_account_that_the_engine_dropped_is_resumed_there(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await started(gateway, engine, [0])
        engine.say_frame(encode(Reject(RejectCode.ACCOUNT_LOST, "silent")))
        assert (await engine.next(Submit)).resume


async def test_a_draining_engine_hands_its_choices_on(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    async with ScriptedEngine(addresses[0]) as one, linked(*addresses, cache_dir=tmp_path) as gateway:
        generation, handle = await started(gateway, one, [0])
        async with ScriptedEngine(addresses[1]) as other:
            one.beat = replace(IDLE, phase=Phase.DRAINING)
            await until(lambda: [link.state.value for link in gateway.router._links] == ["draining", "serving"])
            one.say_refused(handle, ErrorCode.DRAINING)
            submit = await other.next(Submit)
            assert list(submit.generated_ids) == [0]
            other.say_step({submit.handle: (1, [1])})
            other.say_finished(submit.handle, num_generated=2)
            assert (await read_all(generation))[0][1] == [1]


@pytest.mark.parametrize(
    ("sampling", "ids", "end"),
    [
        (SamplingParams(max_tokens=2), [0, 1], (FinishReason.LENGTH, None)),
        (SamplingParams(max_tokens=9), [0, EOS], (FinishReason.STOP, None)),
        (SamplingParams(max_tokens=9, stop_token_ids=(5,)), [0, 5], (FinishReason.STOP, 5)),
    ],
)
async def test_a_choice_that_was_complete_ends_without_another_engine(
    ipc_address: str, tmp_path: Path, sampling: SamplingParams, ids: list[int], end: object
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, _ = await started(gateway, engine, ids, sampling=sampling)
        await engine.die()
        last = await next_delta(generation)
        assert (last.finish_reason, last.stop_reason) == end
        assert gateway.resumes(exact=True) == 0


async def test_logprobs_go_on_too(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(sampling=SamplingParams(logprobs=0), stream=False)
        submit = await engine.next(Submit)
        engine.say_step({submit.handle: (0, [0])}, Logprobs(1, f32([-0.5]), u32([1]), u32([0]), f32([-0.5])))
        await until(lambda: len(generation.choices[0].generated_ids) == 1)
        engine.say_frame(BROKEN)
        submit = await engine.next(Submit)
        columns = Logprobs(1, f32([-0.5, -2.0]), u32([1, 2]), u32([0, 4]), f32([-0.5, -1.0]))
        engine.say_step({submit.handle: (0, [0, 3])}, columns)
        engine.say_finished(submit.handle, num_generated=2)
        _, ids, last = (await read_all(generation))[0]
        assert ids == [0, 3]
        assert last.logprobs == Logprobs(0, f32([-0.5, -2.0]), u32([1, 2]), u32(), f32())


async def test_equal_numerics_are_waited_for_then_the_same_model_does(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    async with (
        ScriptedEngine(addresses[0]) as one,
        linked(*addresses, cache_dir=tmp_path, dispatch=QUICK) as gateway,
    ):
        await started(gateway, one, [0])
        fresh, _ = await started(gateway, one, [])
        async with ScriptedEngine(addresses[1], SAME_MODEL) as other:
            await until(lambda: len(list(gateway.router._offers())) == 2)
            lost_at = time.monotonic()
            await one.die()
            first = await other.next(Submit)
            assert (list(first.generated_ids), first.expect_numerics) == ([], "other numerics")
            assert time.monotonic() - lost_at < 0.3, "no token binds it to the numerics of the first"
            second = await other.next(Submit)
            assert list(second.generated_ids) == [0]
            assert time.monotonic() - lost_at >= 0.3
            other.say_admitted(first.handle)
            other.say_admitted(second.handle)
            await until(lambda: gateway.resumes(exact=False) == 2)
            fresh.abort()


async def test_other_numerics_can_be_refused(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    dispatch = replace(QUICK, resume_inexact=False)
    async with (
        ScriptedEngine(addresses[0]) as one,
        ScriptedEngine(addresses[1], SAME_MODEL) as other,
        linked(*addresses, cache_dir=tmp_path, dispatch=dispatch) as gateway,
    ):
        await until(lambda: len(list(gateway.router._offers())) == 2)  # else the other may be first
        generation, _ = await started(gateway, one, [0])
        await one.die()
        with pytest.raises(Unavailable, match=r"none that can go on came in 0\.3 s"):
            await next_delta(generation)
        assert other.heard(Submit) == 0


async def test_no_engine_at_all_is_a_503_after_the_timeout(ipc_address: str, tmp_path: Path) -> None:
    async with linked(ipc_address, cache_dir=tmp_path, dispatch=QUICK) as gateway:
        async with ScriptedEngine(ipc_address) as engine:
            generation, _ = await started(gateway, engine, [0])
        with pytest.raises(Unavailable, match="the engine was lost"):
            await next_delta(generation)


async def test_a_request_that_kills_engines_ends_with_a_500(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start()
        for number in range(2):
            await engine.next(Submit)
            engine.say_frame(BROKEN)
            await until(lambda number=number: len(engine.peers) == number + 2)  # type: ignore[misc]
        submit = await engine.next(Submit)
        engine.say_step({submit.handle: (0, [5])})  # a token: the count begins anew
        assert (await next_delta(generation)).text == "f"
        for _ in range(3):
            engine.say_frame(BROKEN)
            submit = await engine.next(Submit)
        assert list(submit.generated_ids) == [5]
        engine.say_frame(BROKEN)
        with pytest.raises(EngineFailed, match="3 engines in a row were lost while they worked on this request"):
            await next_delta(generation)


async def test_a_request_that_kills_engines_takes_no_other_with_it(ipc_address: str, tmp_path: Path) -> None:
    """All four come together, so that each of them is as suspect as the deadly one."""
    deadly = [6]

    async def play(engine: ScriptedEngine) -> None:
        while True:
            submit = await engine.next(Submit)
            life = len(engine.peers)
            if list(submit.prompt_ids) == deadly:
                engine.say_frame(BROKEN)
            else:
                asyncio.get_running_loop().call_later(0.05, answer, engine, submit.handle, life)

    def answer(engine: ScriptedEngine, handle: int, life: int) -> None:
        if len(engine.peers) == life:
            engine.say_step({handle: (0, [1])})
            engine.say_finished(handle, num_generated=1)

    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        playing = asyncio.create_task(play(engine))
        await until(lambda: gateway.router.ready)
        prompts = ([1], deadly, [2], [3])
        generations = [await gateway.dispatcher.start(request(prompt)) for prompt in prompts]
        for prompt, generation in zip(prompts, generations, strict=True):
            if prompt == deadly:
                with pytest.raises(EngineFailed, match="3 engines in a row"):
                    await read_all(generation)
            else:
                assert (await read_all(generation))[0][1] == [1]
        playing.cancel()


async def test_a_full_engine_is_asked_again_for_resumed_work(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, handle = await started(gateway, engine, [0])
        engine.say_step({handle: (9, [9])})
        for _ in range(3):
            engine.say_refused((await engine.next(Submit)).handle, ErrorCode.OVERLOADED)
        submit = await engine.next(Submit)
        engine.say_step({submit.handle: (1, [1])})
        engine.say_finished(submit.handle, num_generated=2)
        assert (await read_all(generation))[0][1] == [1]


async def test_a_full_engine_is_asked_again_for_new_work_in_bounds(ipc_address: str, tmp_path: Path) -> None:
    async with (
        ScriptedEngine(ipc_address) as engine,
        linked(ipc_address, cache_dir=tmp_path, dispatch=QUICK) as gateway,
    ):
        generation = await gateway.start()
        engine.say_refused((await engine.next(Submit)).handle, ErrorCode.OVERLOADED)
        submit = await engine.next(Submit)
        assert not submit.resume
        engine.say_step({submit.handle: (0, [1])})
        assert (await next_delta(generation)).text == "b"

        async def refuse_all() -> None:
            while True:
                engine.say_refused((await engine.next(Submit)).handle, ErrorCode.OVERLOADED, "full up")

        refusing = asyncio.create_task(refuse_all())
        generation = await gateway.start()
        began = time.monotonic()
        with pytest.raises(Overloaded, match="full up"):
            await next_delta(generation)
        assert 0.3 <= time.monotonic() - began < 2
        refusing.cancel()


async def test_what_a_request_waited_for_an_engine_counts_when_it_waits_for_room(
    ipc_address: str, tmp_path: Path
) -> None:
    patience = DispatchSettings(credit_wait_s=1.0)
    full = replace(SERVING, grant_requests=1)
    async with (
        ScriptedEngine(ipc_address, full) as engine,
        linked(ipc_address, cache_dir=tmp_path, dispatch=patience) as gateway,
    ):
        await until(lambda: gateway.router.ready)
        running = await gateway.dispatcher.start(request([1]))
        began = time.monotonic()
        with pytest.raises(Overloaded, match=r"no room came in 0\.2 s"):
            await gateway.dispatcher.start(request([2]), waited_s=0.8)
        assert 0.2 <= time.monotonic() - began < 0.8
        with pytest.raises(Overloaded, match="no room came in 0 s"):
            await gateway.dispatcher.start(request([3]), waited_s=1.5)
        running.abort()
        engine.say_finished((await engine.next(Submit)).handle, num_generated=0)

        async def refuse_all() -> None:
            while True:
                engine.say_refused((await engine.next(Submit)).handle, ErrorCode.OVERLOADED, "full up")

        refusing = asyncio.create_task(refuse_all())
        generation = await gateway.dispatcher.start(request([4]), waited_s=0.7)
        began = time.monotonic()
        with pytest.raises(Overloaded, match="full up"):
            await next_delta(generation)
        assert 0.2 <= time.monotonic() - began < 0.9
        refusing.cancel()


async def test_a_client_that_leaves_while_its_engine_is_gone_leaves_nothing(ipc_address: str, tmp_path: Path) -> None:
    async with linked(ipc_address, cache_dir=tmp_path) as gateway:
        async with ScriptedEngine(ipc_address) as engine:
            generation, _ = await started(gateway, engine, [0])
            await engine.die()
        await until(lambda: bool(gateway.dispatcher._moving))
        generation.abort()
        await until(lambda: not gateway.dispatcher._moving)
        async with ScriptedEngine(ipc_address) as engine:
            await until(lambda: gateway.router.ready)
            await gateway.start([4])
            assert list((await engine.next(Submit)).prompt_ids) == [4]
            assert engine.heard(Submit) == engine.heard(Abort) == 0


async def test_many_choices_move_without_holding_the_event_loop(short_dir: Path, tmp_path: Path) -> None:
    addresses = [f"ipc://{short_dir}/{number}.sock" for number in range(2)]
    serving = replace(SERVING, grant_requests=400, grant_tokens=10**6)
    prompt = list(range(400))
    async with ScriptedEngine(addresses[0], serving) as one, linked(*addresses, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(prompt, n=300)
        for _ in range(300):
            await one.next(Submit)
        async with ScriptedEngine(addresses[1], serving) as other:
            await until(lambda: len(list(gateway.router._offers())) == 2)
            await one.die()
            handles = {(await other.next(Submit)).seed for _ in range(300)}
        assert len(handles) == 300
        generation.abort()


async def test_a_fault_of_our_own_is_told_loudly(
    ipc_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, _ = await started(gateway, engine, [0])

        def fail(_: object) -> bool:
            raise RuntimeError("a fault of our own")

        monkeypatch.setattr(gateway.dispatcher, "_is_moved", fail)
        engine.say_frame(BROKEN)
        await until(lambda: bool(gateway.crashes))
        gateway.crashes.clear()
        generation.abort()


async def test_close_while_a_request_waits_for_room(ipc_address: str, tmp_path: Path) -> None:
    serving = replace(SERVING, grant_requests=1)
    async with ScriptedEngine(ipc_address, serving) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, _ = await started(gateway, engine, [])
        waiting = [asyncio.create_task(gateway.start()) for _ in range(2)]
        await until(lambda: sum(len(line) for line in gateway.router._lines.values()) == 2)
        await gateway.dispatcher.close()
        for work in (*waiting, generation.next()):
            with pytest.raises(Unavailable, match="the gateway is stopping"):
                await work
        await engine.end_aborted()
        with pytest.raises(Unavailable, match="the gateway is stopping"):
            await gateway.start()
        assert engine.heard(Submit) == 0


async def test_close_ends_what_is_open(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation, _ = await started(gateway, engine, [0])
        await gateway.dispatcher.close()
        with pytest.raises(Unavailable, match="the gateway is stopping"):
            await next_delta(generation)
        await engine.next(Abort)
