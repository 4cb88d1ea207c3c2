"""Profiles of steps: whole ones, of no other, whoever asks when; and a real engine that is told to make one."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.backends.fake import FakeRunner
from engine.backends.torch_runner import TorchRunner
from engine.config import resolve
from engine.core import EngineCore
from engine.device import profile
from engine.device.profile import NUM_STEPS, ProfiledRunner, idle_share
from engine.events import Delivery
from engine.inbox import Inbox, Submitted
from engine.metrics import EngineMetrics
from protocol.messages import Step, Submit, u32
from protocol.sampling import SamplingParams
from tests.engine.control import alone, fake_config, submit
from tests.engine.peer import Peer
from tests.engine.sequences import Driver, Sequence
from tests.engine.torch_runners import Settings, no_progress
from tests.processes import Engine

StartEngine = Callable[..., Engine]


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def steps_of(path: Path) -> list[int]:
    """Numbers of the steps in a trace of a CPU, in order of time."""
    marks = [event for event in read(path) if event.get("cat") == "user_annotation"]
    return [int(mark["name"].removeprefix("step ")) for mark in sorted(marks, key=lambda mark: mark["ts"])]


class Loop:
    """The step loop around a profiled fake backend."""

    def __init__(self, folder: Path, **values: object) -> None:
        config = fake_config(**values)
        self.runner = ProfiledRunner(FakeRunner(config), folder)
        resolved = resolve(config, self.runner.load(no_progress))
        self.delivered: list[Delivery] = []
        self._inbox = Inbox()
        self._core = EngineCore(resolved, self.runner, self._inbox, self.delivered.extend, EngineMetrics(resolved))

    def submit(self, message: Submit) -> None:
        self._inbox.put(Submitted(1, message))

    def step(self, turns: int) -> None:
        for _ in range(turns):
            self._core.step()

    def settle(self) -> None:
        while self._core.step():
            pass

    def tokens(self, handle: int) -> list[int]:
        messages = [message for _, message in self.delivered if isinstance(message, Step)]
        return [
            token for step in messages for number, token in zip(step.handles, step.ids, strict=True) if number == handle
        ]


def kernel(begin: float, end: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": "k", "ts": begin, "dur": end - begin}


def test_idle_is_where_no_kernel_runs() -> None:
    """Busy from 1000 to 1040, by kernels that overlap, from 1050 to 1060 and from 1070 to 1100: 20 of 100 idle."""
    busy = [kernel(1050, 1060), kernel(1000, 1030), kernel(1070, 1100), kernel(1010, 1015), kernel(1025, 1040)]
    others: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name"},
        kernel(1040, 1050, "gpu_memcpy"),
        kernel(900, 2000, "cuda_runtime"),
        kernel(900, 2000, "user_annotation"),
    ]
    assert idle_share([*others, *busy]) == pytest.approx(0.2)
    assert idle_share(others) == 0.0  # a CPU's one step
    assert idle_share([kernel(0, 10, "user_annotation"), kernel(30, 40, "user_annotation")]) == pytest.approx(0.5)
    assert idle_share([kernel(5, 5)]) == 0.0
    assert idle_share(others[:3]) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_has_whole_steps_and_changes_no_token(depth: int, tmp_path: Path) -> None:
    loop = Loop(tmp_path, fake_depth=depth)
    for handle in (1, 2):
        loop.submit(submit(handle, prompt=[handle] * 20, max_tokens=100))
    loop.step(10)
    loop.runner.ask()
    loop.settle()
    assert loop.runner.max_in_flight == depth
    (path,) = tmp_path.iterdir()
    first, last = map(int, path.name.removesuffix(".json.gz").split("-")[1:])
    assert steps_of(path) == list(range(first, last + 1))
    assert last - first + 1 == NUM_STEPS
    assert 9 <= first <= 12
    for handle in (1, 2):
        assert u32(loop.tokens(handle)) == alone(submit(handle, prompt=[handle] * 20, max_tokens=100))


def test_one_is_asked_for_before_there_is_work_and_not_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, fake_depth=2)
    loop.runner.ask()
    loop.runner.ask()
    loop.submit(submit(1, max_tokens=NUM_STEPS + 5))
    loop.step(5)
    loop.runner.ask()
    loop.settle()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["profile_ignored"] * 2
    loop.runner.ask()
    loop.submit(submit(2, max_tokens=NUM_STEPS))
    loop.settle()
    names = {f"steps-1-{NUM_STEPS}.json.gz", f"steps-{NUM_STEPS + 6}-{2 * NUM_STEPS + 5}.json.gz"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_it_ends_with_the_work_and_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    assert not loop.runner.end_if_idle()
    loop.runner.ask()
    assert loop.runner.end_if_idle()  # not begun
    loop.submit(submit(1, max_tokens=3))
    loop.settle()
    assert loop.runner.end_if_idle()
    assert not list(tmp_path.iterdir())  # more may come
    monkeypatch.setattr(profile, "IDLE_S", 0.0)
    assert not loop.runner.end_if_idle()
    assert steps_of(tmp_path / "steps-1-3.json.gz") == [1, 2, 3]
    loop.runner.ask()
    loop.submit(submit(2, max_tokens=9))
    loop.step(4)
    loop.runner.close()
    assert steps_of(tmp_path / "steps-4-7.json.gz") == [4, 5, 6, 7]


def test_what_cannot_be_written_disturbs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path / "gone")
    loop.runner.ask()
    loop.submit(submit(1, max_tokens=NUM_STEPS + 5))
    loop.settle()
    assert len(loop.tokens(1)) == NUM_STEPS + 5
    (record,) = [record for record in caplog.records if record.message == "profile_failed"]
    assert "No such file or directory" in vars(record)["reason"]


def test_a_profiler_that_does_not_start_disturbs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And may be asked again."""

    def busy(**_: object) -> None:
        raise RuntimeError("another profiler runs")

    loop = Loop(tmp_path, fake_depth=2)
    loop.runner.ask()
    loop.submit(submit(1, max_tokens=5))
    with monkeypatch.context() as patched:
        patched.setattr(profile, "profile", busy)
        loop.settle()
    assert [vars(record)["reason"] for record in caplog.records] == ["another profiler runs"]
    assert (len(loop.tokens(1)), loop.runner.max_in_flight) == (5, 2)
    loop.runner.ask()
    loop.submit(submit(2, max_tokens=NUM_STEPS))
    loop.settle()
    assert [path.name for path in tmp_path.iterdir()] == [f"steps-6-{NUM_STEPS + 5}.json.gz"]


@pytest.fixture
def peer_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


def test_a_signal_to_a_real_engine(
    start_engine: StartEngine, peer_context: zmq.Context[zmq.Socket[bytes]], tiny_models: Path, tmp_path: Path
) -> None:
    """Under load: the trace has torch's operators inside the steps, and SIGUSR2 does not stop the engine."""
    folder = tmp_path / "made" / "profiles"
    flags = ("--device=cpu", "--threads=1", "--kv-cache-memory-bytes=32MiB", f"--profile-dir={folder}")
    engine = start_engine(str(tiny_models / "llama_tied"), *flags)
    with Peer(peer_context, engine.address) as peer:
        peer.greet()
        messages = [submit(handle, [5, 6, handle], max_tokens=150, ignore_eos=True) for handle in (1, 2)]
        peer.say(*messages)
        peer.hear(Step)
        engine.signal(signal.SIGUSR2)
        engine.wait_for_output("profile_begun")
        engine.signal(signal.SIGUSR2)
        written = engine.wait_for_output("profile_written")
        for handle in (1, 2):
            peer.finish(handle)
    assert engine.terminate() == 0
    lines = [json.loads(line) for line in written.splitlines() if '"event": "profile_' in line]
    assert [line["event"] for line in lines] == ["profile_begun", "profile_ignored", "profile_written"]
    (path,) = folder.iterdir()
    told = lines[-1]
    assert (told["path"], told["steps"]) == (str(path), NUM_STEPS)
    events = read(path)
    assert told["idle_percent"] == pytest.approx(100 * (idle_share(events) or 0.0), abs=0.01)
    assert 0 < told["idle_percent"] < 100
    assert any(event["name"].startswith("aten::") for event in events)
    assert steps_of(path) == list(range(lines[0]["first_step"], lines[0]["first_step"] + NUM_STEPS))


@pytest.mark.slow
def test_an_engine_that_goes_idle_writes_what_it_has(
    start_engine: StartEngine, peer_context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """After five seconds; and it wakes for the next request as ever."""
    engine = start_engine("--backend=fake", f"--profile-dir={tmp_path}")
    with Peer(peer_context, engine.address) as peer:
        peer.greet()
        engine.signal(signal.SIGUSR2)
        peer.say(submit(1, max_tokens=7))
        peer.finish(1)
        engine.wait_for_output("profile_written")
        peer.say(submit(2, max_tokens=7))
        peer.finish(2)
    assert engine.terminate() == 0
    assert steps_of(tmp_path / "steps-1-7.json.gz") == list(range(1, 8))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_of_a_gpu_again_and_again(tiny_models: Path, kernel_cache: Path, tmp_path: Path) -> None:
    """Those of graphs too, with as many in each recording."""
    cuda = Settings(
        *(str(tiny_models / "llama_tied"), "bfloat16"),
        device="cuda",
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=64 * 2**20,
        cache_dir=kernel_cache,
    )
    runner = ProfiledRunner(TorchRunner(cuda), tmp_path)
    info = runner.load(no_progress)
    assert runner.max_in_flight == 2
    steps = Driver(runner, num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=24)
    greedy = SamplingParams(max_tokens=NUM_STEPS, min_tokens=NUM_STEPS, temperature=0.0)
    for _ in range(3):
        runner.ask()
        steps.run([Sequence([5, 6, 7], greedy), Sequence([8, 9], greedy)])
    recorded = [[event for event in read(path) if event.get("cat") == "kernel"] for path in sorted(tmp_path.iterdir())]
    assert [len(kernels) for kernels in recorded] == [len(recorded[0])] * 3
    assert len(recorded[0]) > 10 * NUM_STEPS
    assert all(0 < (idle_share(kernels) or 0) < 1 for kernels in recorded)
