"""The gateway as a process, over real sockets, with fake engines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.__main__ import main
from protocol.version import VERSION
from tests.gateway.test_answering import events_of
from tests.processes import Engine, Server, children_of, command_line, free_port

StartEngine = Callable[..., Engine]
StartGateway = Callable[..., Server]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
FAKE = ("--backend=fake",)
#: A fake engine whose answers take some time.
SLOW = ("--backend=fake", "--fake-step-ms=20")


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that do nothing to it."""
    folder = tmp_path_factory.mktemp("shared")
    with tempfile.TemporaryDirectory(prefix="sg-") as short:
        engine = Engine(f"ipc://{short}/engine.sock", FAKE, folder / "engine.log")
        server = Server(["gateway", f"--engine={engine.address}"], free_port(), folder / "gateway.log")
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.close()
            engine.close()


class Stream:
    """An open stream, read as its bytes come."""

    def __init__(self, server: Server, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self._connection.request("POST", path, json.dumps(body | {"stream": True}))
        self.response = self._connection.getresponse()

    def lines(self) -> Iterator[str]:
        while line := self.response.readline():
            yield line.decode()

    def rest(self) -> str:
        return self.response.read().decode()

    def close(self) -> None:
        self._connection.close()


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    status, body = server.get("/metrics")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if line.startswith(f"sluicegate:{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def engine_requests(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    names = ("sluicegate:num_requests_running", "sluicegate:num_requests_waiting")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def metrics_folder(server: Server) -> Path:
    """Where the workers of a gateway keep their metrics."""
    (flag,) = [word for word in command_line(children_of(server.pid)[0]) if word.startswith("--workers-dir=")]
    return Path(flag.partition("=")[2])


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_openai_sdk_drives_every_route(gateway: Server) -> None:
    with client_of(gateway) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "sluicegate"
        messages: Any = CHAT["messages"]
        whole = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=8, seed=1, n=2, logprobs=True
        )
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, len(whole.choices)) == (16, 2)
        assert len((whole.choices[1].logprobs and whole.choices[1].logprobs.content) or ()) == 8
        stream = client.chat.completions.create(
            model="fake",
            messages=messages,
            max_tokens=8,
            seed=1,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, usage = ["", ""], None
        for chunk in stream:
            usage = usage or chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert usage is not None
        assert usage.completion_tokens == 16
        completion = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=4, seed=3)
        streamed = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=4, seed=3, stream=True)
        texts = ["", ""]
        for part in streamed:
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == [choice.text for choice in completion.choices]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="nothing", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="fake", prompt="a", temperature=3)


def test_chat_prompts_share_their_cached_tokens_in_the_usage(gateway: Server) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 1}
    cached = []
    for _ in range(2):
        _, answer = gateway.post("/v1/chat/completions", body)
        cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] >= 96


def test_echo_without_an_answer(gateway: Server) -> None:
    status, body = gateway.post("/v1/completions", {"prompt": "just this", "echo": True, "max_tokens": 0})
    assert status == 200
    answer = json.loads(body)
    assert answer["choices"][0]["text"] == "just this"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_headers_of_a_stream(gateway: Server) -> None:
    stream = Stream(gateway, {"prompt": "a", "max_tokens": 2})
    headers = stream.response.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["x-accel-buffering"] == "no"
    assert "no-store" in headers["cache-control"]
    assert events_of(stream.rest())[-1] == "[DONE]"
    stream.close()


@pytest.mark.parametrize("stream", [False, True])
def test_i1_a_client_that_hangs_up_ends_its_generation(
    start_engine: StartEngine, start_gateway: StartGateway, stream: bool
) -> None:
    port = free_port()
    server = start_gateway(start_engine(*SLOW, f"--metrics-port={port}").address)
    server.wait_until_ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 5000, "stream": stream}))
    until(lambda: engine_requests(port) == 1)
    connection.close()
    until(lambda: engine_requests(port) == 0, timeout_s=2.0)


def test_i4_open_streams_finish_within_the_grace_period(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    server = start_gateway(start_engine(*SLOW).address)
    server.wait_until_ready()
    stream = Stream(server, {"prompt": "a", "max_tokens": 50})
    server.signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    *events, done = events_of(stream.rest())
    stream.close()
    assert done == "[DONE]"
    assert sum(len(event["choices"][0]["text"]) for event in events) == 50
    assert server.wait() == 0


def test_what_is_open_after_the_grace_period_ends_with_an_error(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    server = start_gateway(start_engine(*SLOW).address, flags=("--shutdown-grace=0.5",))
    server.wait_until_ready()
    stream = Stream(server, {"prompt": "a", "max_tokens": 5000})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, "/v1/completions", {"prompt": "a", "max_tokens": 5000})
        time.sleep(0.3)
        server.signal(signal.SIGTERM)
        status, body = whole.result(timeout=10)
    assert status == 503
    assert json.loads(body)["error"]["type"] == "unavailable_error"
    *_, last = events_of(stream.rest())
    stream.close()
    assert last["error"]["type"] == "unavailable_error"
    assert server.wait() == 0


def test_requests_are_503_until_an_engine_serves(
    start_engine: StartEngine, start_gateway: StartGateway, ipc_address: str
) -> None:
    server = start_gateway(ipc_address)
    server.wait_for_output("gateway_listening")
    assert server.get("/health")[0] == 200
    assert server.get("/ready")[0] == 503
    status, body = server.post("/v1/chat/completions", CHAT)
    assert status == 503
    assert json.loads(body)["error"]["type"] == "unavailable_error"
    start_engine(address=ipc_address)
    server.wait_until_ready()
    assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 1})[0] == 200


def test_two_engines_serve_two_models(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    engines = [start_engine("--backend=fake", f"--served-model-name={name}") for name in ("one", "two")]
    server = start_gateway(*(engine.address for engine in engines))
    until(lambda: len(json.loads(server.get("/v1/models")[1] or b'{"data": []}')["data"]) == 2, timeout_s=30)
    for name in ("one", "two"):
        status, body = server.post("/v1/completions", {"model": name, "prompt": "a"})
        assert (status, json.loads(body)["model"]) == (200, name)
    assert server.post("/v1/completions", {"prompt": "a"})[0] == 400


def test_a_head_without_end_is_refused(gateway: Server) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        for _ in range(2):  # the bound is on each request of a connection, not on all together
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-More: " + b"a" * 40_000 + b"\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 64 * 2**20:
                connection.sendall(b"X-More: " + b"a" * 16_000 + b"\r\n")
                sent += 16_010
        answer = connection.recv(4096)
    assert sent < 32 * 2**20
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def test_workers_share_the_port_and_add_up_their_metrics(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    server = start_gateway(start_engine().address, flags=("--workers=2",))
    server.wait_for_output("workers_listening")
    workers = children_of(server.pid)
    assert len(workers) == 2
    until(lambda: all(server.get("/ready")[0] == 200 for _ in range(8)), timeout_s=30)
    for _ in range(40):
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert [metric(server, "request_success_total") for _ in range(6)] == [40] * 6
    assert metric(server, "engines_serving") == 1
    lines = [json.loads(line) for line in server.output().splitlines() if line.startswith("{")]
    served_by = {line["pid"] for line in lines if line["event"] == "request" and line["path"] == "/v1/completions"}
    assert served_by == set(workers)
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: len(set(children_of(server.pid)) - set(workers)) == 1)
    until(lambda: all(server.get("/ready")[0] == 200 for _ in range(8)), timeout_s=30)
    assert [metric(server, "request_success_total") for _ in range(6)] == [40] * 6
    folder, living = metrics_folder(server), {str(pid) for pid in children_of(server.pid)}
    until(lambda: {path.stem.rpartition("_")[2] for path in folder.glob("gauge_live*")} == living, timeout_s=30)
    assert server.terminate() == 0


@pytest.mark.parametrize("flags", [(), ("--workers=2",)])
def test_a_port_that_is_taken_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ipc_address: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr("protocol.ports.PATIENCE_S", 0.0)
    monkeypatch.setattr("protocol.logs.configure", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([f"--engine={ipc_address}", f"--port={taken.getsockname()[1]}", *flags]) == 2
    reason = vars(caplog.records[-1])["reason"]
    assert reason.endswith("Address already in use. Choose another with --port or --host.")


def test_settings_that_cannot_work_are_said(start_gateway: StartGateway) -> None:
    server = start_gateway()
    assert server.wait() == 2
    assert "--engine" in server.output()
    server = start_gateway("tcp://10.1.2.3:5557")
    assert server.wait() == 2
    assert "CURVE" in server.output()


def test_the_api_key_comes_from_the_environment_and_stays_out_of_the_log(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine()
    environ = {"SLUICEGATE_API_KEY": "s3cret"}
    server = Server(["gateway", f"--engine={engine.address}"], free_port(), tmp_path / "log", environ=environ)
    try:
        server.wait_until_ready()
        assert server.get("/v1/models")[0] == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret") as client:
            assert client.completions.create(model="fake", prompt="a").usage is not None
    finally:
        server.close()
    assert "s3cret" not in server.output()


def test_a_gateway_stays_small(gateway: Server) -> None:
    gateway.post("/v1/completions", {"prompt": "a"})
    (line,) = [
        line for line in Path(f"/proc/{gateway.pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    ]
    assert int(line.split()[1]) < 120_000  # KiB


def test_version(gateway: Server) -> None:
    assert json.loads(gateway.get("/version")[1]) == {"version": VERSION}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a5_the_sdk_reads_a_stream_with_keep_alives(start_engine: StartEngine, start_gateway: StartGateway) -> None:
    engine = start_engine("--backend=fake", "--fake-step-ms=33000", "--hang-timeout=120")
    server = start_gateway(engine.address)
    server.wait_until_ready()
    messages: Any = CHAT["messages"]
    with client_of(server) as client:
        chunks = list(client.chat.completions.create(model="fake", messages=messages, max_tokens=2, stream=True))
    assert sum(len(chunk.choices[0].delta.content or "") for chunk in chunks) == 2
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("num_chars", [1_900_000, 5_000_000])
def test_e6_a_huge_chat_stops_nobody_else(
    start_engine: StartEngine, start_gateway: StartGateway, num_chars: int
) -> None:
    server = start_gateway(start_engine("--backend=fake", "--fake-step-ms=5").address)
    server.wait_until_ready()
    stream = Stream(server, {"prompt": "a", "max_tokens": 8000})
    pauses, gaps = [], []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        huge = CHAT | {"messages": [{"role": "user", "content": "many words " * (num_chars // 11)}]}
        answer = pool.submit(server.post, "/v1/chat/completions", huge)
        last = time.monotonic()
        for line in stream.lines():
            if line.startswith("data"):
                gaps.append(time.monotonic() - last)
                asked = last = time.monotonic()
                assert server.get("/health")[0] == 200
                pauses.append(time.monotonic() - asked)
            if answer.done():
                break
    stream.close()
    status, body = answer.result()
    assert (status, bool(json.loads(body)["error"]["message"])) == (400 if num_chars < 2_000_000 else 413, True)
    assert max(pauses) < 0.5
    assert max(gaps) < 0.5
