"""Reading an engine's trace of steps, and having it made at the right moment."""

import asyncio
import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest import gpu_steps
from loadtest.gpu_steps import Gap, Kernel, Steps, read, record, request
from loadtest.servers import Pair, TrialError
from loadtest.transport import Receiver


def event(category: str, name: str, begin: float, end: float) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def write(path: Path, *events: dict[str, object]) -> Path:
    whole = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "displayTimeUnit": "ms"}
    path.write_bytes(gzip.compress(json.dumps(whole).encode()))
    return path


def test_kernels_and_gaps_of_a_step(tmp_path: Path) -> None:
    """Two steps from 100 to 300: kernels overlap, what comes last need not end last, and copies do not fill gaps."""
    step = (
        ("kernel", "products", 0, 40),
        ("kernel", "norm", 30, 35),
        ("kernel", "attention", 38, 60),
        ("kernel", "products", 65, 90),
        ("gpu_memcpy", "Memcpy DtoH", 90, 94),
        ("cuda_runtime", "cudaGraphLaunch", 0, 300),
    )
    events = [event(kind, name, at + begin, at + end) for at in (210, 100) for kind, name, begin, end in step]
    assert read(write(tmp_path / "steps-7-8.json.gz", *events)) == Steps(
        num_steps=2,
        step_us=100.0,
        idle_percent=15.0,  # 5 in each step, 20 between them, of 200
        kernels=[
            Kernel("products", 2.0, 65.0),
            Kernel("attention", 1.0, 22.0),
            Kernel("norm", 1.0, 5.0),
            Kernel("Memcpy DtoH", 1.0, 4.0),
        ],
        gaps=[Gap("products", "products", 0.5, 10.0), Gap("attention", "products", 1.0, 5.0)],
    )


def test_steps_of_a_cpu_are_its_kernels(tmp_path: Path) -> None:
    marks = [event("user_annotation", f"step {number}", 10 * number, 10 * number + 8) for number in (1, 2, 3)]
    steps = read(write(tmp_path / "steps-1-3.json.gz", *marks, event("cpu_op", "aten::mm", 0, 99)))
    assert steps.kernels == [Kernel("step", 1.0, 8.0)]
    assert steps.gaps == [Gap("step", "step", 2 / 3, 4 / 3)]
    assert steps.idle_percent == pytest.approx(100 * 4 / 28)


def test_a_trace_without_kernels_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "steps-1-64.json.gz", event("cuda_runtime", "cudaGraphLaunch", 0, 3))
    with pytest.raises(TrialError, match=r"steps-1-64\.json\.gz has no kernel"):
        read(path)


class Stub(Pair):
    """Streams of which each begins when those before it have; it signals by making a file."""

    def __init__(self, folder: Path, status: int = 200, *, ends: bool = False) -> None:
        self._folder, self._status, self._ends = folder, status, ends
        self._begun = 0
        self.begun_at_signal: int | None = None
        self.bodies: list[bytes] = []
        self.open = 0
        self.engine = self.client = self  # type: ignore[assignment]

    async def post(self, path: str, body: bytes, receiver: Receiver) -> None:
        assert path == "/v1/completions"
        self.bodies.append(body)
        self.open += 1
        try:
            await asyncio.sleep(0.01 * self.open)
            receiver.begin(self._status)
            receiver.feed(b"no such model" if self._status != 200 else b"data: {}", 0.0)
            self._begun += 1
            await asyncio.sleep(0.0 if self._ends or self._status != 200 else 60.0)
        finally:
            self.open -= 1

    def check(self) -> None: ...

    def describe(self, text: str) -> str:
        return f"engine: {text}"

    def signal(self, number: signal.Signals) -> None:
        assert number is signal.SIGUSR2
        self.begun_at_signal = self._begun
        (self._folder / "steps-1-64.json.gz").touch()


def body(number: int) -> bytes:
    return request("m", 2000, 3, number)


def test_the_signal_comes_when_all_streams_have_begun(tmp_path: Path) -> None:
    pair = Stub(tmp_path)
    assert asyncio.run(record(pair, body, 5, tmp_path)) == tmp_path / "steps-1-64.json.gz"
    assert (pair.begun_at_signal, pair.open) == (5, 0)
    asked = [json.loads(each) for each in pair.bodies]
    assert len({tuple(each["prompt"]) for each in asked}) == 5
    assert all(1000 <= token < 2000 for each in asked for token in each["prompt"])
    assert all(each["ignore_eos"] and each["stream"] and each["max_tokens"] == 512 for each in asked)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: Stub(folder, status=404), "an answer ended: no such model"),
        (lambda folder: Stub(folder, ends=True), "an answer ended: it is complete"),
    ],
)
def test_what_is_no_measurement(make: Callable[[Path], Stub], text: str, tmp_path: Path) -> None:
    pair = make(tmp_path)
    with pytest.raises(TrialError, match=text):
        asyncio.run(record(pair, body, 2, tmp_path))
    assert pair.open == 0


def test_it_waits_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Stub, "signal", lambda self, number: None)
    with pytest.raises(TrialError, match=r"engine: waited for a trace for 0\.1 s"):
        asyncio.run(record(Stub(tmp_path), body, 2, tmp_path))
