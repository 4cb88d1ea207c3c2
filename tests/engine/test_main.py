"""The engine as a process: phases, signals, restarts, metrics, and what it says when it cannot start."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

import engine.__main__ as engine_main
from protocol.messages import EngineBeat, ErrorCode, FinishReason, Hello, Phase, Role, Step, Welcome, u32
from protocol.process import Parent
from tests.engine.control import alone, submit
from tests.engine.peer import Peer
from tests.processes import ROOT, Engine, free_port

Context = zmq.Context[zmq.Socket[bytes]]
StartEngine = Callable[..., Engine]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


def events(engine: Engine) -> list[str]:
    return [json.loads(line)["event"] for line in engine.output().splitlines() if line.startswith("{")]


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_gateways_are_welcomed_while_it_loads_and_again_when_it_serves(start_engine: StartEngine, context: Context):
    engine = start_engine("--backend=fake", "--fake-load-s=1.5", "--served-model-name=small")
    engine.wait_for_output("engine_listening")
    with Peer(context, engine.address) as peer:
        peer.say(Hello((1, 0), Role.GATEWAY, "peer", "test"))
        loading = peer.hear(Welcome)
        assert (loading.phase, loading.serving) == (Phase.LOADING, None)
        assert peer.hear(EngineBeat).phase is Phase.LOADING
        peer.say(submit(1))
        refused = peer.finish(1)
        assert refused.error is not None
        assert refused.error.code is ErrorCode.OVERLOADED
        serving = peer.hear(Welcome)
        assert serving.epoch == loading.epoch
        assert serving.serving is not None
        assert serving.serving.model == "small"
        message = submit(2, max_tokens=3)
        peer.say(message)
        peer.finish(2)
        assert u32(peer.tokens(2)) == alone(message)
    assert engine.terminate() == 0
    assert events(engine)[-1] == "engine_drained"


def test_metrics_health_and_ready(start_engine: StartEngine, context: Context):
    port = free_port()
    engine = start_engine("--backend=fake", "--fake-load-s=1.0", f"--metrics-port={port}")
    engine.wait_for_output("engine_listening")
    assert get(port, "/health") == (200, "ok\n")
    assert get(port, "/ready") == (503, "loading\n")
    assert get(port, "/metrics") == (200, "")
    assert get(port, "/other")[0] == 404
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=5))
        peer.finish(1)
    assert get(port, "/ready") == (200, "serving\n")
    deadline = time.monotonic() + 5
    while 'sluicegate:generation_tokens_total{model_name="fake"} 5.0\n' not in (shown := get(port, "/metrics"))[1]:
        assert time.monotonic() < deadline, shown  # what was answered is counted right after
        time.sleep(0.01)
    assert shown[0] == 200
    assert engine.terminate() == 0


def test_sigterm_drains_and_tells_gateways(start_engine: StartEngine, context: Context):
    engine = start_engine("--backend=fake", "--fake-step-ms=20")
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=30))
        peer.hear(Step)
        engine.signal(signal.SIGTERM)
        assert peer.hear(EngineBeat, lambda beat: beat.phase is Phase.DRAINING).running == 1
        peer.say(submit(2))
        refused = peer.finish(2)
        assert refused.error is not None
        assert refused.error.code is ErrorCode.DRAINING
        assert peer.finish(1).reason is FinishReason.LENGTH
        assert len(peer.tokens(1)) == 30
    assert engine.wait() == 0


def test_what_is_left_when_the_drain_timeout_ends_is_told(start_engine: StartEngine, context: Context):
    engine = start_engine("--backend=fake", "--fake-step-ms=20", "--drain-timeout=0.5")
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=5000))
        peer.hear(Step)
        engine.signal(signal.SIGTERM)
        finished = peer.finish(1)
        assert finished.error is not None
        assert finished.error.code is ErrorCode.DRAINING
        assert finished.num_generated == len(peer.tokens(1))
    assert engine.wait() == 0


def test_a_second_signal_ends_it_at_once(start_engine: StartEngine, context: Context):
    engine = start_engine("--backend=fake", "--fake-step-ms=5000", "--drain-timeout=60")
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=50))
        peer.hear(EngineBeat, lambda beat: beat.running == 1)
        engine.signal(signal.SIGINT)
        engine.wait_for_output("engine_draining")
        engine.signal(signal.SIGINT)
        assert engine.wait(timeout_s=2.0) == 1


def test_a_signal_while_it_loads_ends_it(start_engine: StartEngine):
    engine = start_engine("--backend=fake", "--fake-load-s=60")
    engine.wait_for_output("engine_listening")
    started = time.monotonic()
    assert engine.terminate() == 0
    assert time.monotonic() - started < 2.0


def test_a_step_that_hangs_is_seen_in_beats(start_engine: StartEngine, context: Context):
    engine = start_engine("--backend=fake", "--fake-step-ms=3000")
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=2))
        beat = peer.hear(EngineBeat, lambda beat: beat.step_age_ms > 1000)
        assert (beat.step, beat.running, beat.longest_step_ms) == (0, 1, 0)
        beat = peer.hear(EngineBeat, lambda beat: beat.step == 1)
        assert 3000 <= beat.longest_step_ms < 4000
        assert beat.step_age_ms < 1500
        engine.kill()


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (
            ("--backend=nonsense",),
            2,
            "--backend must be one of auto, fake, torch_runner, transformers; got 'nonsense'.",
        ),
        (("--backend=fake", "--listen=tcp://0.0.0.0:5557"), 1, "requires --curve-secret-key-file"),
        (("--backend=fake", "--max-num-seqs=300"), 2, "--max-num-batched-tokens must be at least --max-num-seqs (300)"),
        (("--backend=fake", "--block-size=20"), 2, "--block-size: Input should be a multiple of 16"),
        (("--backend=fake", "--curve-secret-key-file=x"), 2, "go together"),
        (("--backend=fake", f"--served-model-name={'m' * 513}"), 2, "at most 512 characters, got 513"),
        (
            ("--backend=fake", "--profile-dir=/dev/null/x"),
            2,
            "--profile-dir /dev/null/x: Not a directory. Name a folder in which the engine may write.",
        ),
        (("--backend=fake", "--max-num-sequences=3"), 2, "did you mean --max-num-seqs?"),
        pytest.param(  # imports torch
            ("--backend=torch_runner", "--model=/nowhere"), 2, "/nowhere is not a directory", marks=pytest.mark.slow
        ),
    ],
)
def test_what_stops_it_from_starting(start_engine: StartEngine, flags: tuple[str, ...], status: int, text: str):
    engine = start_engine(*flags)
    assert engine.wait(timeout_s=30.0) == status
    assert text in engine.output()
    assert "Traceback" not in engine.output()


@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_signal_for_a_profile_ends_an_engine_unless_it_makes_one(
    start_engine: StartEngine, is_profiled: bool, tmp_path: Path
):
    """With a folder for it an engine that still loads goes on."""
    flags = (f"--profile-dir={tmp_path}",) if is_profiled else ()
    engine = start_engine("--backend=fake", "--fake-load-s=1.0", *flags)
    engine.wait_for_output("engine_loading")
    engine.signal(signal.SIGUSR2)
    if is_profiled:
        engine.wait_for_output("engine_serving")
        assert engine.terminate() == 0
    else:
        assert engine.wait() == -signal.SIGUSR2


BROKEN = """
import sys
from engine import backends
from engine.__main__ import main
from engine.backends.fake import FakeRunner

class BrokenRunner(FakeRunner):
    def collect(self):
        result = super().collect()
        if result.step == 3:
            raise RuntimeError("the device is lost")
        return result

backends.BUILT_IN["broken"] = "__main__:BrokenRunner"
sys.exit(main(sys.argv[1:]))
"""


def test_a_lost_device_ends_the_process_and_its_gateways_see_it_at_once(ipc_address: str, context: Context):
    command = [sys.executable, "-c", BROKEN, "--backend=broken", f"--listen={ipc_address}"]
    with (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as engine,
        Peer(context, ipc_address) as peer,
    ):
        peer.greet()
        with peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            peer.say(submit(1, max_tokens=50))
            assert monitor.poll(5_000)
            peer.socket.disable_monitor()
        _, errors = engine.communicate(timeout=10)
        assert engine.returncode == 1
        assert "RuntimeError: the device is lost" in errors
        peer.hear_all()
        assert len(peer.tokens(1)) == 2  # what had been made was told
        assert not peer.finished


@pytest.mark.parametrize(
    ("transport", "num_lives"),
    [("ipc", 3), ("tcp", 3), *(pytest.param(transport, 20, marks=pytest.mark.slow) for transport in ("ipc", "tcp"))],
)
def test_killed_and_restarted_it_answers_every_time(
    transport: str, num_lives: int, ipc_address: str, context: Context, tmp_path: Path
):
    address = ipc_address if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    message = submit(1, max_tokens=5)
    expected = alone(message)
    epochs = set()
    for life in range(num_lives):
        engine = Engine(address, ("--backend=fake",), tmp_path / f"{life}.log")
        try:
            with Peer(context, address) as peer:
                peer.say(Hello((1, 0), Role.GATEWAY, "peer", "test"))
                epochs.add(peer.hear(Welcome).epoch)
                peer.hear(EngineBeat, lambda beat: beat.phase is Phase.SERVING)
                peer.say(message)
                peer.finish(1)
                assert u32(peer.tokens(1)) == expected
        finally:
            engine.kill()
    assert len(epochs) == num_lives


def test_the_step_log_has_a_line_for_each_step(start_engine: StartEngine, context: Context, tmp_path: Path):
    log = tmp_path / "steps.jsonl"
    engine = start_engine("--backend=fake", f"--step-log={log}", "--fake-step-ms=10")
    with Peer(context, engine.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=5))
        peer.finish(1)
    assert engine.terminate() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["step"], line["num_sampled"]) for line in lines] == [(step, 1) for step in range(1, 6)]
    assert all(later["monotonic_ns"] > line["monotonic_ns"] for line, later in pairwise(lines))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("alone", "terminal"), [(True, True), (True, False), (False, True)])
def test_a_load_is_a_bar_on_a_terminal_of_its_own_and_lines_of_the_log_elsewhere(
    alone: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(engine_main, "PROGRESS_S", 0.0)
    loading = engine_main._Loading(Parent(None), alone=alone)
    with caplog.at_level("INFO", "engine"):
        loading("loading weights", 5_000_000, 20_000_000)
        time.sleep(0.01)
        loading("loading weights", 15_000_000, 20_000_000)
    loading.close()
    drawn = "| 15.0M/20.0M [" in stderr.getvalue() and "B/s]" in stderr.getvalue()
    records = [vars(record) for record in caplog.records if record.message == "engine_loading"]
    assert drawn == (alone and terminal)
    assert [(record["phase"], record["done"], record["total"]) for record in records] == (
        [] if drawn else [("loading weights", 5_000_000, 20_000_000), ("loading weights", 15_000_000, 20_000_000)]
    )
    assert all(0 <= record["bytes_per_second"] <= 10_000_000 / 0.01 for record in records)
    assert drawn or records[1]["bytes_per_second"] > 0
