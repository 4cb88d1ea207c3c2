"""What both sides' /metrics say after traffic that is known to the token, over two gateway workers."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import Engine, Server, free_port

Start = Callable[..., Engine]
StartGateway = Callable[..., Server]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

_PROMPT = "sixteen letters.and eight"  # 25 tokens, of which a block of 16 is found again
_WAIT_S = 20.0


def scrape(port: int) -> Samples:
    """Every sample by its name without the prefix and its labels without the model's name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return {
        (sample.name.removeprefix("sluicegate:"), labels(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(of: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in of.items() if name != "model_name"))


def plain(samples: Samples, *names: str) -> dict[str, float]:
    return {name: samples[name, ()] for name in names}


def complete(server: Server, **fields: object) -> None:
    """One completion that has to succeed, on a connection of its own so that workers take turns."""
    status, body = server.post("/v1/completions", {"prompt": _PROMPT, "ignore_eos": True, **fields})
    assert status == 200, body


def leave(server: Server) -> None:
    """Begin a long stream, read its first event, and close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        body = {"prompt": "another one", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
    finally:
        connection.close()


def settled(port: int, condition: Callable[[Samples], bool]) -> Samples:
    """What is shown once `condition` holds, which it has to within 20 s."""
    deadline = time.monotonic() + _WAIT_S
    while not condition(samples := scrape(port)):
        assert time.monotonic() < deadline, samples
        time.sleep(0.05)
    return samples


@pytest.fixture
def ports(start_engine: Start, start_gateway: StartGateway) -> tuple[int, Server]:
    """The engine's metrics port, and a gateway of two workers that both are ready."""
    port = free_port()
    engine = start_engine("--backend=fake", "--fake-step-ms=2", f"--metrics-port={port}")
    server = start_gateway(engine.address, flags=("--workers=2",))
    server.wait_for_output("workers_listening")
    server.wait_until_ready()
    return port, server


def test_known_traffic_is_counted_to_the_token(ports: tuple[int, Server]) -> None:
    engine_port, server = ports
    for stream in (False, True):
        for _ in range(6):
            complete(server, max_tokens=5, stream=stream)
    complete(server, max_tokens=7, n=3)
    assert server.post("/v1/completions", {"prompt": 7})[0] == 400
    assert server.post("/v1/completions", {"prompt": "x", "model": "nobody"})[0] == 404
    leave(server)

    gateway = settled(
        server.port, lambda samples: ("request_success_total", (("finished_reason", "abort"),)) in samples
    )
    gateway = settled(server.port, lambda s: s["request_success_total", (("finished_reason", "abort"),)] == 1)
    assert plain(
        gateway,
        "e2e_request_latency_seconds_count",
        "time_to_first_token_seconds_count",
        "request_time_per_output_token_seconds_count",
        "request_prompt_tokens_count",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
        "request_max_num_generation_tokens_sum",
        "request_params_n_sum",
        "request_params_max_tokens_sum",
        "engines_serving",
    ) == {
        "e2e_request_latency_seconds_count": 13,
        "time_to_first_token_seconds_count": 14,  # of the stream that was left, too
        "request_time_per_output_token_seconds_count": 15,  # choices
        "request_prompt_tokens_count": 13,
        "request_prompt_tokens_sum": 13 * 25,
        "request_generation_tokens_sum": 12 * 5 + 3 * 7,
        "request_max_num_generation_tokens_sum": 12 * 5 + 7,
        "request_params_n_sum": 12 + 3,
        "request_params_max_tokens_sum": 12 * 5 + 7,
        "engines_serving": 1,
    }
    # How many gaps a stream has depends on which of its tokens were joined.
    assert gateway["inter_token_latency_seconds_count", ()] > 0
    ended = {reason: gateway["request_success_total", (("finished_reason", reason),)] for reason in ("length", "abort")}
    assert ended == {"length": 15, "abort": 1}
    errors = {dict(key)["status"]: value for (name, key), value in gateway.items() if name == "request_errors_total"}
    assert errors == {"400": 1, "404": 1}

    engine = settled(engine_port, lambda samples: samples["num_aborts_total", ()] == 1)
    assert plain(
        engine,
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prompt_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_inference_time_seconds_count",
        "request_prefill_kv_computed_tokens_sum",
    ) == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "num_preemptions_total": 0,
        "prompt_tokens_total": 15 * 25 + len("another one"),
        "prefix_cache_queries_total": 15 * 25 + len("another one"),
        "prefix_cache_hits_total": 14 * 16,
        "request_queue_time_seconds_count": 16,
        "request_prefill_time_seconds_count": 15,
        "request_decode_time_seconds_count": 15,
        "request_inference_time_seconds_count": 15,
        "request_prefill_kv_computed_tokens_sum": 15 * 25 - 14 * 16,
    }
    assert engine["generation_tokens_total", ()] >= 12 * 5 + 3 * 7 + 1
    assert engine["iteration_tokens_total_count", ()] == engine["step_duration_seconds_count", ()] > 0
    shape = {"block_size": "16", "num_gpu_blocks": "4096", "enable_prefix_caching": "True"}
    assert engine["cache_config_info", labels(shape)] == 1
