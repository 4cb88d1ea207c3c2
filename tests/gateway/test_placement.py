"""One choice between its link and its text side."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import BadRequest, ContextLengthExceeded, EngineFailed
from protocol.messages import Abort, AbortReason, ErrorCode, FinishReason, Logprobs, Submit, f32, u32
from protocol.sampling import SamplingParams, choice_seed
from tests.gateway.scripted_engine import (
    SERVING,
    UNDECODABLE,
    ScriptedEngine,
    linked,
    next_delta,
    read_all,
    until,
)


async def test_a_submit_says_all_that_an_engine_has_to_know(ipc_address: str, tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.5, logit_bias=((4, 1.5),))
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await gateway.start(
            [8, 9], sampling=sampling, seed=-3, priority=-1, salt="tenant", traceparent="00-aa-bb-01", request_id="id"
        )
        submit = await engine.next(Submit)
        assert submit == Submit(
            handle=submit.handle,
            request_id="id",
            prompt_ids=u32([8, 9]),
            sampling=sampling,
            seed=choice_seed(-3, 0),
            traceparent="00-aa-bb-01",
            priority=-1,
            salt="tenant",
            expect_digest="digest",
            expect_numerics="numerics",
        )


async def test_from_submit_to_finish(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(sampling=SamplingParams(logprobs=1))
        submit = await engine.next(Submit)
        engine.say_admitted(submit.handle, cached_tokens=2)
        columns = Logprobs(1, f32([-0.5, -1.5]), u32([1, 2]), u32([7, 9]), f32([-0.5, -1.0]))
        engine.say_step({submit.handle: (0, [7, 8])}, columns)
        engine.say_finished(submit.handle, num_generated=2)
        text, ids, last = (await read_all(generation))[0]
        assert (text, ids, last.finish_reason, last.logprobs) == ("hi", [7, 8], FinishReason.LENGTH, columns)
        assert generation.choices[0].cached_tokens == 2
        assert generation.choices[0].admitted


async def test_a_stop_string_aborts_at_the_engine_and_wins_over_its_end(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(stop=("cd",))
        submit = await engine.next(Submit)
        engine.say_step({submit.handle: (0, [1, 2, 3, 4])})
        engine.say_finished(submit.handle, num_generated=4)
        text, ids, last = (await read_all(generation))[0]
        assert (text, ids) == ("b", [1, 2, 3])
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "cd")
        assert await engine.next(Abort) == Abort(submit.handle, AbortReason.STOP_STRING)


async def test_siblings_share_a_group_and_seeds_follow_the_choice(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        await gateway.start([1], [2, 3], n=2, seed=11)
        submits = [await engine.next(Submit) for _ in range(4)]
        assert [list(submit.prompt_ids) for submit in submits] == [[1], [1], [2, 3], [2, 3]]
        assert [submit.leader for submit in submits] == [True, False, True, False]
        groups = [submit.group for submit in submits]
        assert groups[0] == groups[1] != groups[2] == groups[3]
        assert None not in groups
        assert [submit.seed for submit in submits] == [choice_seed(11, j) for j in (0, 1, 0, 1)]


async def test_a_seed_is_drawn_where_none_is_given(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        seeds = set()
        for _ in range(3):
            await gateway.start(seed=None)
            seeds.add((await engine.next(Submit)).seed)
        assert len(seeds) == 3


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.BAD_REQUEST, BadRequest),
        (ErrorCode.TOO_LONG, ContextLengthExceeded),
        (ErrorCode.INTERNAL, EngineFailed),
    ],
)
async def test_an_engines_error_reaches_the_reader(
    ipc_address: str, tmp_path: Path, code: ErrorCode, error: type[Exception]
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start()
        engine.say_refused((await engine.next(Submit)).handle, code, "no such thing")
        with pytest.raises(error, match="no such thing"):
            await next_delta(generation)


async def test_what_makes_no_frame_is_a_bad_request(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(salt="\ud800")
        with pytest.raises(BadRequest, match="SUBMIT"):
            await next_delta(generation)
        await gateway.start()
        assert (await engine.next(Submit)).handle == 0, "its handle is free again"


async def test_an_error_of_one_choice_ends_the_others(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=2)
        first, second = await engine.next(Submit), await engine.next(Submit)
        engine.say_step({first.handle: (0, [1])})
        engine.say_refused(first.handle, ErrorCode.INTERNAL)
        assert (await next_delta(generation)).text == "b"
        with pytest.raises(EngineFailed):
            await next_delta(generation)
        assert (await engine.end_aborted()).handle == second.handle


async def test_an_engine_that_ends_a_request_by_itself_has_failed(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start()
        engine.say_finished((await engine.next(Submit)).handle, FinishReason.ABORT)
        with pytest.raises(EngineFailed, match="ended the request"):
            await next_delta(generation)


async def test_ids_that_make_no_text_end_their_request_alone(
    ipc_address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        bad, good = await gateway.start(), await gateway.start()
        first, second = await engine.next(Submit), await engine.next(Submit)
        engine.say_step({first.handle: (0, [UNDECODABLE]), second.handle: (0, [1])})
        assert (await next_delta(good)).text == "b"
        with pytest.raises(EngineFailed, match="could not make text"):
            async for _ in bad:
                pass
        assert await engine.next(Abort) == Abort(first.handle, AbortReason.CLIENT)
        assert "choice_failed" in caplog.messages


@pytest.mark.parametrize("end", ["finished", "stop string", "error", "client left"])
async def test_a_request_that_is_over_is_freed_without_the_garbage_collector(
    ipc_address: str, tmp_path: Path, end: str
) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        held = [await gateway.start(stop=("c",), n=2)]
        first, second = await engine.next(Submit), await engine.next(Submit)
        engine.say_step({first.handle: (0, [1]), second.handle: (0, [1])})
        assert (await next_delta(held[0])).text == "b"
        gc.disable()
        try:
            if end == "client left":
                held[0].abort()
            for submit in (first, second):
                if end == "stop string":
                    engine.say_step({submit.handle: (1, [2])})
                if end == "error":
                    engine.say_refused(submit.handle, ErrorCode.INTERNAL)
                else:
                    engine.say_finished(submit.handle, num_generated=2 if end == "stop string" else 1)
            await until(lambda: all(choice.ended for choice in held[0].choices))
            freed = weakref.ref(held.pop())
            await until(lambda: freed() is None)
        finally:
            gc.enable()


async def test_a_client_that_leaves_ends_its_choices_at_the_engine(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=2)
        submits = [await engine.next(Submit) for _ in range(2)]
        generation.abort()
        aborts = [await engine.next(Abort) for _ in range(2)]
        assert aborts == [Abort(submit.handle, AbortReason.CLIENT) for submit in submits]


async def test_a_client_that_leaves_the_line_for_credit_leaves_nothing(ipc_address: str, tmp_path: Path) -> None:
    serving = replace(SERVING, grant_requests=1)
    async with ScriptedEngine(ipc_address, serving) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=3)
        submit = await engine.next(Submit)
        starting = asyncio.create_task(gateway.start())
        await asyncio.sleep(0.01)
        starting.cancel()
        generation.abort()
        assert (await engine.end_aborted()).handle == submit.handle
        # The only credit is free again, and nobody took it meanwhile.
        await gateway.start([4])
        assert list((await engine.next(Submit)).prompt_ids) == [4]
        assert engine.heard(Submit) == 0


async def test_only_the_first_choice_of_a_call_may_be_refused(ipc_address: str, tmp_path: Path) -> None:
    serving = replace(SERVING, grant_requests=1)
    async with ScriptedEngine(ipc_address, serving) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=3)
        for number in range(3):
            submit = await engine.next(Submit)
            assert engine.heard(Submit) == 0
            engine.say_step({submit.handle: (0, [number])})
            engine.say_finished(submit.handle, num_generated=1)
        assert {index: text for index, (text, _, _) in (await read_all(generation)).items()} == {0: "a", 1: "b", 2: "c"}


async def test_nothing_to_generate_needs_no_engine(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(n=2, sampling=SamplingParams(max_tokens=0))
        ends = await read_all(generation)
        assert [(text, ids, last.finish_reason) for text, ids, last in ends.values()] == [
            ("", [], FinishReason.LENGTH),
            ("", [], FinishReason.LENGTH),
        ]
        assert engine.heard(Submit) == 0
