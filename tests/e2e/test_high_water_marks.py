"""Queues of one frame: everything waits, nothing is lost. Case N2 of the list of faults."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway import dealer
from protocol.sampling import SamplingParams
from tests.e2e.api import Api, assert_identical
from tests.engine.test_server import engine
from tests.gateway.scripted_engine import linked, read_all, request, until
from tests.processes import Server

PATH = "/v1/completions"
NUM_REQUESTS, NUM_TOKENS = 25, 400


@pytest.mark.parametrize("stop_s", [5.0, pytest.param(15.0, marks=[pytest.mark.slow, pytest.mark.timeout(120)])])
def test_a_stopped_gateway_gets_ten_thousand_tokens(
    ipc_address: str, start_gateway: Callable[..., Server], stop_s: float
) -> None:
    """Over 5 s of a full queue its account is dropped, and it resumes."""
    with engine(ipc_address, high_water_mark=1, max_num_seqs=32, fake_num_blocks=1024, fake_step_ms=3.0) as running:
        gateway = start_gateway(ipc_address)
        gateway.wait_until_ready()
        api = Api(gateway.url)
        bodies = [
            {"prompt": f"{number}", "max_tokens": NUM_TOKENS, "seed": number, "return_token_ids": True}
            for number in range(NUM_REQUESTS)
        ]
        expected = api.answers(PATH, bodies)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(api.answers, PATH, [body | {"cache_salt": "stopped"} for body in bodies])
            running.wait(lambda: running.core.status.running == NUM_REQUESTS)
            gateway.signal(signal.SIGSTOP)
            time.sleep(stop_s)
            gateway.signal(signal.SIGCONT)
            for one, other in zip(expected, answers.result(), strict=True):
                assert_identical(one, other)
        running.wait(lambda: running.core.status.free_blocks == 1024)


async def test_both_queues_of_one_frame(ipc_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealer, "HIGH_WATER", 1)
    with engine(ipc_address, high_water_mark=1, max_num_seqs=32, fake_num_blocks=1024):
        async with linked(ipc_address, cache_dir=tmp_path) as gateway:
            await until(lambda: gateway.router.ready)
            sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

            async def ids() -> list[list[int]]:
                generation = await gateway.dispatcher.start(request([7, 8], model="fake", n=20, sampling=sampling))
                return [ids for _, (_, ids, _) in sorted((await read_all(generation)).items())]

            first, second = await asyncio.gather(ids(), ids())
            assert first == second
            assert [len(each) for each in first] == [NUM_TOKENS] * 20
            assert gateway.resumes(exact=True) == 0, "the link was lost"
