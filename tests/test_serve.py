"""`sluicegate serve` as a person meets it: real processes, the fake backend."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sluicegate_serve
from engine.config import EngineConfig
from gateway.config import GatewayConfig
from protocol.config import Settings, options_of
from protocol.ports import PortUnavailable
from protocol.progress import ProgressBar
from sluicegate_serve import ServeConfig, available_port, greeting, programs
from tests.processes import Process, Server, children_of, command_line, free_port

StartServe = Callable[..., Server]


def configured(*argv: str) -> ServeConfig:
    return ServeConfig.load(argv, {}, prog="serve")


def child(server: Process, command: str) -> int:
    """The pid of the child that runs a command."""
    (pid,) = (pid for pid in children_of(server.pid) if command in command_line(pid)[:5])
    return pid


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}/cmdline").exists() and command_line(pid) != [""]:  # a zombie has no command line
        assert time.monotonic() < deadline, f"{pid} is still there: {command_line(pid)}"
        time.sleep(0.02)


@pytest.fixture
def stream() -> Iterator[Callable[[Server], ResponseLines]]:
    """Opens an endless completion on a server and gives its lines as they come."""
    sockets: list[socket.socket] = []

    def start(server: Server) -> ResponseLines:
        body = json.dumps(
            {"model": "fake", "prompt": "a", "stream": True, "max_tokens": 5000, "ignore_eos": True, "seed": 1}
        )
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        sockets.append(connection)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        lines = ResponseLines(connection)
        assert b" 200 " in next(lines)
        assert any(line.startswith(b"data: {") for line in lines)
        return lines

    yield start
    for connection in sockets:
        connection.close()


class ResponseLines:
    """Lines of a response until the connection ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def __iter__(self) -> ResponseLines:
        return self

    def __next__(self) -> bytes:
        line = self._file.readline()
        if not line:
            self._file.close()
            raise StopIteration
        return line.rstrip()


def test_ready_prints_the_url_and_a_line_that_streams_an_answer(start_serve: StartServe) -> None:
    server = start_serve("--backend=fake", "--fake-step-ms=20")  # events are joined where nobody reads them yet
    output = server.wait_for_output("curl -N")
    assert f"fake is served at {server.url}/v1\n" in output
    (line,) = re.findall(r"^  (curl -N .*)$", output, re.MULTILINE)
    answer = subprocess.run(["bash", "-c", line + " --silent --max-time 10"], capture_output=True, check=False)
    events = [event for event in answer.stdout.split(b"\n\n") if event.startswith(b"data: ")]
    assert len(events) > 5
    assert events[-1] == b"data: [DONE]"
    assert json.loads(events[0].removeprefix(b"data: "))["object"] == "chat.completion.chunk"


def test_children_are_in_its_session_and_joined_in_a_private_folder(start_serve: StartServe) -> None:
    server = start_serve()
    server.wait_for_output("curl -N")
    engine, gateway = child(server, "engine"), child(server, "gateway")
    assert os.getsid(engine) == os.getsid(gateway) == os.getsid(server.pid)
    (address,) = (word for word in command_line(gateway) if word.startswith("--engine="))
    folder = Path(address.removeprefix("--engine=ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert not folder.exists()


def test_ctrl_c_stops_both_in_good_order(start_serve: StartServe) -> None:
    server = start_serve()
    server.wait_for_output("curl -N")
    pids = child(server, "engine"), child(server, "gateway")
    began = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - began < 3
    for pid in pids:
        wait_until_gone(pid)
    output = server.output()
    assert "engine_drained" in output
    assert "_killed" not in output


def test_open_streams_end_with_an_error_event_after_the_grace(start_serve: StartServe, stream) -> None:
    server = start_serve("--backend=fake", "--fake-step-ms=20", "--shutdown-grace=0.5")
    server.wait_until_ready()
    lines = stream(server)
    server.signal(signal.SIGTERM)
    events = [line for line in lines if line.startswith(b"data: ")]
    assert "error" in json.loads(events[-1].removeprefix(b"data: "))
    assert server.wait() == 0


def test_a_second_ctrl_c_ends_at_once(start_serve: StartServe, stream) -> None:
    server = start_serve("--backend=fake", "--fake-step-ms=20", "--shutdown-grace=60")
    server.wait_until_ready()
    stream(server)
    pids = child(server, "engine"), child(server, "gateway")
    server.signal(signal.SIGINT)
    time.sleep(0.5)
    assert server.popen.poll() is None
    began = time.monotonic()
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert time.monotonic() - began < 1
    for pid in pids:
        wait_until_gone(pid)


def test_a_killed_engine_is_started_again_and_an_open_stream_goes_on(start_serve: StartServe, stream) -> None:
    server = start_serve("--backend=fake", "--fake-step-ms=20")
    server.wait_until_ready()
    lines = stream(server)
    first = child(server, "engine")
    os.kill(first, signal.SIGKILL)
    server.wait_for_output("engine_ended")
    for _ in range(200):
        event = next(line for line in lines if line.startswith(b"data: "))
        assert b"error" not in event
    assert child(server, "engine") != first


def test_a_request_that_comes_while_the_engine_is_away_waits_for_it(start_serve: StartServe) -> None:
    server = start_serve("--backend=fake", "--fake-load-s=1")
    server.wait_until_ready()
    os.kill(child(server, "engine"), signal.SIGKILL)
    while server.get("/ready")[0] == 200:
        time.sleep(0.005)
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        assert server.post(path, body)[0] == 200
    assert server.post("/v1/completions", {"model": "none", "prompt": "a"})[0] == 404


async def test_an_engine_that_dies_as_it_is_announced_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(0, b""), (503, b"{}"), (200, b'{"data": []}'), (200, b'{"data": [{"id": "m"}]}')])
    monkeypatch.setattr(sluicegate_serve, "get", lambda config, path: next(answers))
    assert await sluicegate_serve.served_model(sluicegate_serve.ServeConfig()) == "m"


def test_children_drain_and_exit_when_the_supervisor_is_killed(start_serve: StartServe) -> None:
    server = start_serve()
    server.wait_until_ready()
    pids = child(server, "engine"), child(server, "gateway")
    server.kill()
    for pid in pids:
        wait_until_gone(pid)


def test_what_a_killed_supervisor_left_is_no_hindrance_to_the_next(start_serve: StartServe, short_dir: Path) -> None:
    """Its port, which its gateway has until it notices, and its folder."""
    environ = {"TMPDIR": str(short_dir)}
    first = start_serve("--backend=fake", environ=environ)
    first.wait_until_ready()
    first.kill()
    (left,) = short_dir.glob("sluicegate-*")
    second = start_serve("--backend=fake", port=first.port, environ=environ)
    second.wait_for_output("curl -N")
    (folder,) = short_dir.glob("sluicegate-*")
    assert folder != left


def test_a_taken_port_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("protocol.ports.PATIENCE_S", 0.0)
    monkeypatch.setattr(sluicegate_serve.logs, "configure", lambda *_: None)
    monkeypatch.setattr(sluicegate_serve, "serve", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert sluicegate_serve.main(["--backend=fake", f"--port={port}"]) == 1
    assert capsys.readouterr().err == (
        f"sluicegate serve: cannot listen on 127.0.0.1 port {port}: Address already in use. "
        "Choose another with --port or --host.\n"
    )


def test_a_folder_without_a_model_is_refused_before_anything_is_started(
    start_serve: StartServe, tmp_path: Path
) -> None:
    server = start_serve(str(tmp_path))
    assert server.wait() == 1
    assert server.output() == (
        f"sluicegate serve: {tmp_path} has no config.json; name a folder in the Hugging Face layout.\n"
    )


def test_a_model_that_can_never_be_served_is_tried_once(start_serve: StartServe, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    server = start_serve(str(tmp_path), "--backend=torch_runner")
    assert server.wait(timeout_s=30) == 1
    told = server.output().partition("sluicegate serve: the engine does not start: ")[2]
    assert "has 3 problems:" in told
    assert "MambaForCausalLM" in told
    assert "has no weights" in told
    assert "has no tokenizer" in told
    assert server.output().count('"engine_starting"') == 1


def test_a_wrong_option_names_the_nearest(start_serve: StartServe) -> None:
    server = start_serve("--backend=fake", "--max-num-seq=4")
    assert server.wait() == 2
    assert "unknown option --max-num-seq; did you mean --max-num-seqs?" in server.output()


def test_a_key_reaches_the_gateway_and_no_command_line(start_serve: StartServe) -> None:
    server = start_serve("--backend=fake", environ={"SLUICEGATE_API_KEY": "hunter2"})
    output = server.wait_for_output("curl -N")
    assert "hunter2" not in output
    assert '-H "Authorization: Bearer $SLUICEGATE_API_KEY"' in output
    for pid in children_of(server.pid):
        assert not any("hunter2" in word for word in command_line(pid))
    assert server.get("/v1/models")[0] == 401


def test_options_are_passed_to_the_child_they_belong_to(tmp_path: Path) -> None:
    config = configured("m", "--port=1", "--max-num-seqs=4", "--hang-timeout=3", "--log-level=debug")
    (engine,), (gateway,) = programs(config, tmp_path)
    shared = ["--log-level=debug", "--log-format=json"]
    address = f"ipc://{tmp_path}/engine.sock"
    assert list(engine.argv[2:5]) == ["-m", "sluicegate", "engine"]
    assert sorted(engine.argv[5:]) == sorted(
        ["--model=m", "--max-num-seqs=4", "--hang-timeout=3.0", f"--listen={address}", *shared]
    )
    assert list(gateway.argv[2:5]) == ["-m", "sluicegate", "gateway"]
    assert sorted(gateway.argv[5:]) == sorted(["--port=1", "--hang-timeout=3.0", f"--engine={address}", *shared])


def test_children_are_given_the_time_that_they_give_to_open_work(tmp_path: Path) -> None:
    config = configured("m", "--drain-timeout=7", "--shutdown-grace=90")
    (engine,), (gateway,) = programs(config, tmp_path)
    assert (engine.grace_s, gateway.grace_s) == (7.0, 90.0)


def test_children_get_no_variable_that_serve_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEGATE_PORT", "1")
    for group in programs(configured("m"), tmp_path):
        for program in group:
            assert not [name for name in program.environ if name.startswith("SLUICEGATE_")]


@pytest.mark.parametrize("program", [EngineConfig, GatewayConfig])
def test_serve_has_every_option_that_is_not_its_own_to_decide(program: type[Settings]) -> None:
    serve = {option.name for option in options_of(ServeConfig)}
    assert {option.name for option in options_of(program)} - serve == ServeConfig.decided & program.model_fields.keys()


def test_no_variable_of_one_program_is_nearly_one_of_the_other() -> None:
    """Else it would be refused as a slip of the pen by the program that does not have it."""
    for one, other in ((EngineConfig, GatewayConfig), (GatewayConfig, EngineConfig)):
        for option in options_of(one):
            if not option.internal and option.name not in Settings.model_fields:
                other.load([], {option.variable: "1"} if option.name not in other.model_fields else {}, prog="test")


def test_the_port_is_looked_at_before_and_chosen_where_it_is_zero() -> None:
    port = free_port()
    assert available_port("127.0.0.1", port) == port
    assert available_port("127.0.0.1", 0) > 0
    with pytest.raises(PortUnavailable, match=r"cannot listen on 203\.0\.113\.1 port 1: .*--port or --host"):
        available_port("203.0.113.1", 1)


def test_the_greeting_quotes_for_a_shell_and_names_a_reachable_host() -> None:
    text = greeting(configured("--host=0.0.0.0", "--port=81"), "my 'model'")
    (line,) = re.findall(r"^  (curl -N .*)$", text, re.MULTILINE)
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines()[2] == "http://127.0.0.1:81/v1/chat/completions"
    assert json.loads(words.stdout.splitlines()[-1])["model"] == "my 'model'"
    assert sluicegate_serve.url(configured("--host=::", "--port=81")) == "http://[::1]:81"


def test_without_a_model_the_demo_model_is_made_ready_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[ServeConfig] = []

    def ensure(cache_dir: Path, progress: Callable[[str, int, int], None]) -> Path:
        progress("downloading", 1, 2)
        return cache_dir / "models/demo"

    async def serve(config: ServeConfig, _bar: ProgressBar) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(sluicegate_serve, "ensure_demo_model", ensure)
    monkeypatch.setattr(sluicegate_serve, "serve", serve)
    monkeypatch.setattr(sluicegate_serve.logs, "configure", lambda *_: None)
    assert sluicegate_serve.main(["--port=0", f"--cache-dir={tmp_path}"]) == 0
    assert served[0].model == f"{tmp_path}/models/demo"
    assert served[0].served_model_name == "SmolLM2-135M-Instruct"
    assert sluicegate_serve.main(["--port=0", f"--cache-dir={tmp_path}", "--served-model-name=x"]) == 0
    assert served[1].served_model_name == "x"
