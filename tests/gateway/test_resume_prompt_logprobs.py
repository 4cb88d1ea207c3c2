"""Logprobs of prompts across the lives of engines: none is lost, none comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.generation import Generation
from protocol.messages import FinishReason, Logprobs, PromptLogprobs, Submit, f32, u32
from protocol.sampling import SamplingParams
from tests.engine.control import fake_prompt_logprobs
from tests.gateway.scripted_engine import Gateway, ScriptedEngine, linked, until
from tests.processes import Engine

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)
PROMPT = (1, 2, 3, 4, 5, 6)


def rows(*own: float) -> Logprobs:
    n = len(own)
    return Logprobs(1, f32(own), u32([1] * n), u32([9] * n), f32([-0.5] * n))


async def test_a_resumed_choice_asks_for_the_rest(ipc_address: str, tmp_path: Path) -> None:
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(PROMPT, sampling=SCORED, stream=False)
        submit = await engine.next(Submit)
        assert (submit.prompt_logprobs_from, submit.sampling.prompt_logprobs) == (1, 0)
        engine.say(PromptLogprobs(submit.handle, 1, rows(-1, -2)))
        await until(lambda: generation.choices[0].next_scored == 3)
        engine.say_frame(b"\xff" * 3)
        submit = await engine.next(Submit)
        assert (submit.prompt_logprobs_from, submit.resume) == (3, True)
        engine.say(PromptLogprobs(submit.handle, 2, rows(-2, -3)))  # an engine may say again what is known
        engine.say(PromptLogprobs(submit.handle, 4, rows(-4, -5)))
        engine.say_finished(submit.handle)
        delta = await asyncio.wait_for(generation.next(), 5)
        assert delta is not None
        assert (delta.finish_reason, generation.choices[0].prompt_logprobs) == (
            FinishReason.LENGTH,
            rows(-1, -2, -3, -4, -5),
        )


@pytest.mark.parametrize("fault", ["a gap", "an early end", "an early token"])
async def test_what_is_missing_fails_the_link_and_is_asked_again(ipc_address: str, tmp_path: Path, fault: str) -> None:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    async with ScriptedEngine(ipc_address) as engine, linked(ipc_address, cache_dir=tmp_path) as gateway:
        generation = await gateway.start(PROMPT, sampling=sampling, stream=False)
        submit = await engine.next(Submit)
        engine.say(PromptLogprobs(submit.handle, 1, rows(-1)))
        match fault:
            case "a gap":
                engine.say(PromptLogprobs(submit.handle, 3, rows(-3, -4, -5)))
            case "an early end":
                engine.say_finished(submit.handle)
            case "an early token":
                engine.say_step({submit.handle: (0, [7])})
        submit = await engine.next(Submit)
        assert (submit.prompt_logprobs_from, list(submit.generated_ids)) == (2, [])
        engine.say(PromptLogprobs(submit.handle, 2, rows(-2, -3, -4, -5)))
        engine.say_step({submit.handle: (0, [7])})
        engine.say_finished(submit.handle, num_generated=1)
        delta = await asyncio.wait_for(generation.next(), 5)
        assert delta is not None
        assert list(delta.ids) == [7]
        assert generation.choices[0].prompt_logprobs == rows(-1, -2, -3, -4, -5)


async def _started(gateway: Gateway, prompt: bytes, salt: str, max_tokens: int) -> Generation:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
    return await gateway.start(list(prompt), model="fake", sampling=sampling, salt=salt, n=2, stream=False)


async def _read(generation: Generation) -> list[tuple[list[int], Logprobs | None]]:
    async with asyncio.timeout(50):
        deltas = sorted([delta async for delta in generation], key=lambda delta: delta.index)
    return [(delta.ids.tolist(), generation.choices[delta.index].prompt_logprobs) for delta in deltas]


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_kill_9_in_the_middle_of_a_prompt(
    start_engine: Callable[..., Engine], tmp_path: Path, max_tokens: int
) -> None:
    """The fake backend in chunks of 50 positions: the two choices take 72 steps of 4 ms."""
    prompt = bytes(33 + (7 * place + place // 90) % 90 for place in range(1800))
    flags = ("fake", "--backend=fake", "--fake-step-ms=4", "--max-num-batched-tokens=50", "--max-num-seqs=8")
    engines = [start_engine(*flags) for _ in range(2)]
    async with linked(*(engine.address for engine in engines), cache_dir=tmp_path) as gateway:
        await until(lambda: len(list(gateway.router._offers())) == 2)
        undisturbed = await _read(await _started(gateway, prompt, "a", max_tokens))
        generation = await _started(gateway, prompt, "b", max_tokens)
        leader = generation.choices[0]
        await until(lambda: leader.num_received >= 500)
        placement = leader._carrier
        assert 500 <= leader.num_received < 1799
        engines[gateway.router._links.index(placement.seat.link)].kill()  # type: ignore[union-attr]
        assert await _read(generation) == undisturbed
        assert gateway.resumes(exact=True) == 2
    (ids, scored), (_, other) = undisturbed
    assert len(ids) == max_tokens
    assert scored is not None
    assert list(scored.own) == list(fake_prompt_logprobs(prompt).values())
    assert other == scored
