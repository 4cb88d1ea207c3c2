"""Clients that stop reading or leave: what they cost, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.compare import Answer
from loadtest.transport import Body, HttpClient
from tests.e2e.api import Api, assert_identical
from tests.processes import Engine, Process, Server, free_port

PATH = "/v1/completions"


def resident_mib(process: Process) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("seconds", [4.0, pytest.param(60.0, marks=[pytest.mark.slow, pytest.mark.timeout(180)])])
def test_a_client_that_stops_reading_costs_little_and_loses_nothing(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server], seconds: float
) -> None:
    """What is unread merges: some bytes a token, not an event of 750 bytes for each.

    A long model name makes events large, for the kernel alone buffers some 4 MB.
    """
    port = free_port()
    flags = ("--max-model-len=4096", f"--served-model-name={'m' * 500}", f"--metrics-port={port}")
    engine = start_engine("--backend=fake", *flags)
    gateway = start_gateway(engine.address)
    gateway.wait_until_ready()
    api, engine_api = Api(gateway.url), Api(f"http://127.0.0.1:{port}")
    body = {"prompt": "on and on", "max_tokens": 3000, "n": 4, "seed": 1, "return_token_ids": True}
    expected = api.answer(PATH, body)
    streamed = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        before = most = resident_mib(gateway)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(streamed)}\r\n\r\n"
        client.sendall(head.encode() + streamed)
        until = time.monotonic() + seconds
        while time.monotonic() < until or engine_api.metric("num_requests_running"):
            most = max(most, resident_mib(gateway))
            assert gateway.get("/health")[0] == 200
            time.sleep(0.2)
        assert most - before < 16
        raw = b"".join(iter(lambda: client.recv(2**16), b""))
    _, _, chunked = raw.partition(b"\r\n\r\n")
    assert_identical(expected, Answer.from_stream(_unchunked(chunked)))
    assert len(raw) < 7_000_000, "an event for each of 12,000 tokens would be 9 MB"


def _unchunked(body: bytes) -> bytes:
    """A body without the frames of HTTP/1.1's chunked coding."""
    pieces, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces)


async def test_j5_requests_dropped_at_random_moments_leave_nothing(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server]
) -> None:
    """500 of them, waiting, in prefill, decoding; then one that takes the whole pool is admitted."""
    port = free_port()
    flags = ("--max-num-seqs=8", "--fake-step-ms=2", "--fake-num-blocks=64", "--max-model-len=1000")
    engine = start_engine("--backend=fake", *flags, f"--metrics-port={port}")
    gateway = start_gateway(engine.address)
    gateway.wait_until_ready()
    rng = random.Random(5)
    async with HttpClient(gateway.url) as client:

        async def dropped() -> None:
            body = {
                "prompt": "x" * rng.randrange(1, 500),
                "max_tokens": 400,
                "n": rng.choice((1, 1, 2)),
                "stream": rng.random() < 0.5,
            }
            request = asyncio.create_task(client.post(PATH, json.dumps(body).encode(), Body()))
            await asyncio.wait({request}, timeout=rng.expovariate(1 / 0.05))
            request.cancel()
            await asyncio.wait({request})

        for _ in range(500 // 20):
            await asyncio.gather(*(dropped() for _ in range(20)))
    metrics = Api(f"http://127.0.0.1:{port}")
    async with asyncio.timeout(5):
        while any(
            metrics.metric(name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ):
            await asyncio.sleep(0.05)
    answer = await asyncio.to_thread(Api(gateway.url).answer, PATH, {"prompt": "y" * 960, "max_tokens": 40})
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 40


def test_i1_i5_a_client_that_hangs_up_ends_its_request_with_every_middleware_on(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    port = free_port()
    engine = start_engine("--backend=fake", "--fake-step-ms=20", f"--metrics-port={port}")
    environ = {"SLUICEGATE_API_KEY": "key"}
    gateway = Server(["gateway", f"--engine={engine.address}"], free_port(), tmp_path / "gateway.log", environ=environ)
    metrics = Api(f"http://127.0.0.1:{port}")
    body = json.dumps({"prompt": "a", "max_tokens": 5000}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        gateway.wait_until_ready()
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(head.encode() + body)
            while metrics.metric("num_requests_running") != 1:
                time.sleep(0.02)
        left = time.monotonic()
        while metrics.metric("num_requests_running") or metrics.metric("kv_cache_usage_perc"):
            assert time.monotonic() - left < 2
            time.sleep(0.02)
    finally:
        gateway.close()
