"""An engine killed in mid-stream: the client's answer is identical to that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.api import Api, assert_identical
from tests.processes import Server, children_of, command_line

#: Long enough that a kill after the first events comes in the middle.
SAMPLED = {
    "model": "tiny",
    "prompt": "The way of a request",
    "max_tokens": 500,
    "temperature": 0.9,
    "seed": 7,
    "ignore_eos": True,
    "return_token_ids": True,
}

REQUESTS = {
    "plain": SAMPLED,
    "two choices with penalties": SAMPLED
    | {"n": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "filters and logprobs": SAMPLED | {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
    "two prompts with a stop string": SAMPLED
    | {"prompt": ["one", "another"], "stop": ["zq", "@!x"], "min_tokens": 300},
}


def engine_of(server: Server) -> int:
    """Process id of the engine that `serve` runs now."""
    engines = [pid for pid in children_of(server.pid) if "engine" in command_line(pid)]
    assert len(engines) == 1, engines
    return engines[0]


@pytest.fixture
def server(start_serve: Callable[..., Server], tiny_models: Path) -> Server:
    server = start_serve(str(tiny_models / "llama_untied"), "--served-model-name=tiny", "--threads=1")
    server.wait_until_ready()
    return server


def test_streams_go_on_where_they_were(server: Server) -> None:
    api = Api(server.url)
    expected = api.answers("/v1/completions", [body | {"cache_salt": "undisturbed"} for body in REQUESTS.values()])
    with ExitStack() as streams:
        killed = [
            streams.enter_context(api.stream("/v1/completions", body | {"cache_salt": "killed"}))
            for body in REQUESTS.values()
        ]
        for stream in killed:
            stream.read_events(3)
        os.kill(engine_of(server), signal.SIGKILL)
        for name, stream, undisturbed in zip(REQUESTS, killed, expected, strict=True):
            assert_identical(undisturbed, stream.read_to_end())
            assert stream.done, name
    assert api.metric("resumes_total") == 6  # two of the four have two choices


def test_an_unstreamed_answer_goes_on_too(server: Server) -> None:
    api = Api(server.url)
    expected = api.answer("/v1/completions", SAMPLED | {"cache_salt": "undisturbed"})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(api.answer, "/v1/completions", SAMPLED | {"cache_salt": "killed"})
        with api.stream("/v1/completions", SAMPLED | {"seed": 8}) as beside:
            beside.read_events(2)  # so the engine is at work
            os.kill(engine_of(server), signal.SIGKILL)
            beside.read_to_end()
        actual = answer.result()
    assert_identical(expected, actual)
    assert api.metric("resumes_total") >= 1
