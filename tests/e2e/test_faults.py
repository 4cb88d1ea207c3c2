"""Engines and gateways that stand still, die or are replaced, as clients see it. Cases I, N of the list of faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.api import Api, Body, assert_identical
from tests.processes import Engine, Server, free_port

StartEngine = Callable[..., Engine]
StartGateway = Callable[..., Server]

PATH = "/v1/completions"
SLOW = ("--backend=fake", "--fake-step-ms=20")
BODY: dict[str, Any] = {
    "prompt": "It goes on",
    "max_tokens": 150,
    "temperature": 0.9,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
}


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until it holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.02)
    return time.monotonic() - started


def error_of(body: Body, api: Api) -> tuple[int, str, str]:
    """(status, type, message) of a refused request."""
    response = api.post(PATH, body)
    error = response.json()["error"]
    return response.status_code, error["type"], error["message"]


# --- engines that stand still --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop_s", "hang_s"), [(3.0, 1.0), pytest.param(15.0, 2.0, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
def test_i2_a_stopped_engine_is_left_and_all_heals(
    start_engine: StartEngine, start_gateway: StartGateway, stop_s: float, hang_s: float
) -> None:
    engine = start_engine(*SLOW)
    gateway = start_gateway(engine.address, flags=(f"--hang-timeout={hang_s}", "--credit-wait=0.2"))
    gateway.wait_until_ready()
    api = Api(gateway.url)
    expected = api.answer(PATH, BODY | {"cache_salt": "undisturbed"})
    with api.stream(PATH, BODY) as stream:
        stream.read_events(5)
        engine.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        red_after_s = until(lambda: gateway.get("/ready")[0] == 503, stop_s)
        assert red_after_s < hang_s + 1.0
        assert gateway.get("/health")[0] == 200
        assert error_of(BODY, api)[:2] == (503, "unavailable_error")
        time.sleep(max(0.0, stopped + stop_s - time.monotonic()))
        engine.signal(signal.SIGCONT)
        actual = stream.read_to_end()
    assert_identical(expected, actual)
    assert api.metric("resumes_total") == 1
    gateway.wait_until_ready()
    assert_identical(expected, api.answer(PATH, BODY | {"cache_salt": "healed"}))


def test_i2_without_another_engine_a_stream_ends_with_an_error_after_the_resume_timeout(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    engine = start_engine(*SLOW)
    gateway = start_gateway(engine.address, flags=("--resume-timeout=1", "--credit-wait=0.2"))
    gateway.wait_until_ready()
    api = Api(gateway.url)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", stream=True, prompt="a", max_tokens=2000)
        reasons = [next(stream).choices[0].finish_reason]
        engine.kill()
        killed_at = time.monotonic()
        with pytest.raises(openai.APIError, match=r"none that can go on came in 1 s") as raised:
            reasons += [chunk.choices[0].finish_reason for chunk in stream]
    assert 0.9 < time.monotonic() - killed_at < 4
    assert set(reasons) == {None}
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "unavailable_error"
    assert error_of(BODY, api)[:2] == (503, "unavailable_error")
    start_engine(*SLOW, address=engine.address)
    gateway.wait_until_ready()
    assert api.answer(PATH, BODY).usage is not None


def test_i3_while_weights_load(start_engine: StartEngine, start_gateway: StartGateway, ipc_address: str) -> None:
    gateway = start_gateway(ipc_address)
    gateway.wait_for_output("gateway_listening")
    start_engine("--backend=fake", "--fake-load-s=4", address=ipc_address).wait_for_output("engine_listening")
    api = Api(gateway.url)
    assert gateway.get("/health")[0] == 200
    assert gateway.get("/ready")[0] == 503
    assert error_of(BODY, api)[:2] == (503, "unavailable_error")
    gateway.wait_until_ready()
    assert api.answer(PATH, BODY).usage is not None


# --- engines that die ----------------------------------------------------------------------------

DEADLY = "\x07"


def test_a_request_that_kills_engines_ends_and_nobody_else(start_serve: Callable[..., Server]) -> None:
    server = start_serve("--backend=fake", "--fake-step-ms=20", f"--fake-deadly-token={ord(DEADLY)}")
    server.wait_until_ready()
    api = Api(server.url)
    expected = api.answer(PATH, BODY | {"cache_salt": "undisturbed"})
    with api.stream(PATH, BODY) as stream, ThreadPoolExecutor(1) as pool:
        stream.read_events(3)
        deadly = pool.submit(error_of, BODY | {"prompt": DEADLY}, api)
        actual = stream.read_to_end()
        status, kind, message = deadly.result()
    assert (status, kind) == (500, "server_error")
    assert message.startswith("3 engines in a row were lost while they worked on this request")
    assert_identical(expected, actual)


@pytest.mark.parametrize("allowed", [True, False])
def test_resume_across_unequal_numerics_follows_its_option(
    start_engine: StartEngine, start_gateway: StartGateway, allowed: bool
) -> None:
    engines = {}
    for numerics in (1, 2):
        port = free_port()
        engines[port] = start_engine(*SLOW, f"--fake-numerics={numerics}", f"--metrics-port={port}")
    flags = ("--resume-timeout=1", f"--resume-inexact={'allow' if allowed else 'refuse'}")
    gateway = start_gateway(*(engine.address for engine in engines.values()), flags=flags)
    gateway.wait_until_ready()
    api = Api(gateway.url)
    until(lambda: api.metric("engines_serving") == 2, 20)
    expected = api.answer(PATH, BODY | {"cache_salt": "undisturbed"})
    with api.stream(PATH, BODY) as stream:
        stream.read_events(3)
        for port, engine in engines.items():
            if Api(f"http://127.0.0.1:{port}").metric("num_requests_running"):
                engine.kill()
        killed_at = time.monotonic()
        actual = stream.read_to_end()
    if allowed:
        assert time.monotonic() - killed_at > 1.0  # an engine of equal numerics was waited for
        assert_identical(expected, actual)  # the fake's tokens do not depend on its numerics
        assert 'sluicegate:resumes_total{exact="false"} 1.0' in httpx.get(f"{gateway.url}/metrics", verify=False).text
    else:
        assert actual.error is not None
        assert actual.error["type"] == "unavailable_error"
        assert actual.choices[0].finish_reason is None
        assert api.metric("resumes_total") == 0


# --- gateways that stand still or are several ----------------------------------------------------


@pytest.mark.parametrize("stop_s", [5.0, pytest.param(15.0, marks=[pytest.mark.slow, pytest.mark.timeout(120)])])
def test_streams_of_a_gateway_that_stood_still(
    start_engine: StartEngine, start_gateway: StartGateway, stop_s: float
) -> None:
    """For longer than the engine keeps its mail (5 s) or its account (10 s) they are resumed."""
    port = free_port()
    engine = start_engine("--backend=fake", "--fake-step-ms=5", f"--metrics-port={port}")
    gateway = start_gateway(engine.address)
    gateway.wait_until_ready()
    api = Api(gateway.url)
    long = BODY | {"max_tokens": 1500, "n": 2}
    expected = api.answer(PATH, long | {"cache_salt": "undisturbed"})
    with api.stream(PATH, long) as stream:
        stream.read_events(5)
        gateway.signal(signal.SIGSTOP)
        time.sleep(stop_s)
        gateway.signal(signal.SIGCONT)
        actual = stream.read_to_end()
    assert_identical(expected, actual)
    until(lambda: Api(f"http://127.0.0.1:{port}").metric("kv_cache_usage_perc") == 0, 5)


def test_n4_pairs_with_one_request_id_at_two_gateways(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    engine = start_engine()
    gateways = [start_gateway(engine.address) for _ in range(2)]
    for gateway in gateways:
        gateway.wait_until_ready()

    def ask(number: int, at: int) -> str:
        body = {"prompt": f"{number} {at}", "max_tokens": 12, "seed": at}
        headers = {"X-Request-Id": "the-same"}
        response = httpx.post(f"{gateways[at].url}{PATH}", json=body, headers=headers, timeout=30, verify=False)
        assert response.headers["x-request-id"] == "the-same"
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    alone = [ask(number, at) for number in range(50) for at in range(2)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda item: ask(item // 2, item % 2), range(100)))
    assert together == alone
    assert len(set(alone)) == 100


def test_n5_dropped_streams_are_counted_as_aborted(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    port = free_port()
    gateway = start_gateway(start_engine(*SLOW, f"--metrics-port={port}").address)
    gateway.wait_until_ready()
    api, engine = Api(gateway.url), Api(f"http://127.0.0.1:{port}")
    for _ in range(5):
        with api.stream(PATH, BODY) as stream:
            stream.read_events(2)
    until(lambda: engine.metric("num_aborts_total") == 5, 5)
    assert engine.metric("num_requests_running") == 0


def test_n6_every_scrape_of_two_workers_shows_all(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_engine().address, flags=("--workers=2",))
    gateway.wait_for_output("workers_listening")
    until(lambda: all(gateway.get("/ready")[0] == 200 for _ in range(8)), 30)
    api = Api(gateway.url)
    seen = []
    for number in range(100):
        api.answer(PATH, {"prompt": "a", "max_tokens": 1})
        if number % 10 == 9:
            seen.append(api.metric("request_success_total"))
    assert seen == [10.0 * scrape for scrape in range(1, 11)]
