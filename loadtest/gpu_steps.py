"""Where the time of decode steps goes: a trace that an engine under streams makes of itself (`--profile-dir`), read."""

from __future__ import annotations

import asyncio
import gzip
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtest.client import Endpoint
from loadtest.servers import Pair, TrialError

#: What is asked for: more than the steps until all streams have begun, those of a recording, and some beyond.
_ANSWER_TOKENS = 512
_LEAST_ID = 1000
_TIMEOUT_S = 120.0
_POLL_S = 0.02

#: Names by which an engine's file says which steps it has.
_FILES = "steps-*-*.json.gz"

#: Categories of a trace: what a GPU does, of which only the first keeps it busy; and a CPU's steps.
_KERNEL, _COPIES, _STEP = "kernel", ("gpu_memcpy", "gpu_memset"), "user_annotation"


@dataclass(frozen=True, slots=True)
class Kernel:
    """`us` is the time it takes of a step; kernels may overlap. `count` is of a step too."""

    name: str
    count: float
    us: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Time of a step in which no kernel runs, after one and before another."""

    after: str
    before: str
    count: float
    us: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of a running engine. `step_us` and `idle_percent` count from the first kernel's begin to the last's
    end; idle is where no kernel runs, inside of steps or between them. The longest come first.
    """

    num_steps: int
    step_us: float
    idle_percent: float
    kernels: list[Kernel]
    gaps: list[Gap]


class _Stream:
    """Receives an answer, of which only the beginning matters."""

    def __init__(self) -> None:
        self.has_begun = False
        self.refusal = b""
        self._status = 0

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, data: bytes, at: float) -> None:
        del at
        if self._status == 200:
            self.has_begun = True
        else:
            self.refusal += data


async def record(pair: Pair, body: Callable[[int], bytes], streams: int, folder: Path) -> Path:
    """The trace of an engine that writes them to `folder`, of steps in which all `streams` decode and nothing else is
    computed. `body` makes the request of each.

    Raises TrialError where a stream ends before, or no trace comes; ServerFailed where the engine ends.
    """
    answers = [_Stream() for _ in range(streams)]
    tasks = [
        asyncio.create_task(pair.client.post(Endpoint.COMPLETIONS.path, body(number), answer))
        for number, answer in enumerate(answers)
    ]

    async def wait_for(what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            pair.engine.check()
            for task, answer in zip(tasks, answers, strict=True):
                if task.done():
                    why = answer.refusal.decode(errors="replace") or task.exception() or "it is complete"
                    raise TrialError(f"waiting for {what}, an answer ended: {why}")
            if there():
                return
            if time.monotonic() > deadline:
                raise TrialError(pair.engine.describe(f"waited for {what} for {_TIMEOUT_S:g} s, in vain"))
            await asyncio.sleep(_POLL_S)

    try:
        await wait_for("first tokens", lambda: all(answer.has_begun for answer in answers))
        pair.engine.signal(signal.SIGUSR2)
        await wait_for("a trace", lambda: bool(_traces(folder)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _traces(folder)[0]


def _traces(folder: Path) -> list[Path]:
    return list(folder.glob(_FILES))


def request(model: str, vocab: int, prompt_tokens: int, seed: int) -> bytes:
    """A streamed completion of random ids."""
    ids = random.Random(seed)
    return orjson.dumps(
        {
            "model": model,
            "prompt": [ids.randrange(_LEAST_ID, vocab) for _ in range(prompt_tokens)],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    )


@dataclass(frozen=True, slots=True)
class _Span:
    begin: float  # us
    end: float
    name: str


def read(path: Path) -> Steps:
    """What is in an engine's trace. Raises TrialError for one without a kernel; a CPU's steps count as kernels."""
    first, last = map(int, path.name.split(".")[0].split("-")[1:])
    by_category: dict[str, list[_Span]] = defaultdict(list)
    for event in orjson.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if (category := event.get("cat")) in (_KERNEL, *_COPIES, _STEP):
            # A CPU's steps are told apart by number, which is no kernel's name.
            name = event["name"].split(" ")[0] if category == _STEP else event["name"]
            by_category[category].append(_Span(event["ts"], event["ts"] + event["dur"], name))
    busy = by_category[_KERNEL] or by_category[_STEP]
    if not busy:
        raise TrialError(f"{path.name} has no kernel: may this user profile the GPU?")
    copies = [span for category in _COPIES for span in by_category[category]]
    num_steps = last - first + 1
    return _steps(sorted(busy, key=lambda span: span.begin), copies, num_steps)


def _steps(busy: Sequence[_Span], copies: Sequence[_Span], num_steps: int) -> Steps:
    """`busy` by time of begin."""
    kernels: dict[str, list[float]] = defaultdict(list)
    for span in (*busy, *copies):
        kernels[span.name].append(span.end - span.begin)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    last = busy[0]
    for span in busy:
        if span.begin > last.end:
            gaps[last.name, span.name].append(span.begin - last.end)
        if span.end > last.end:
            last = span
    whole = last.end - busy[0].begin
    idle = sum(map(sum, gaps.values()))
    return Steps(
        num_steps=num_steps,
        step_us=whole / num_steps,
        idle_percent=100.0 * idle / whole,
        kernels=sorted(
            (Kernel(name, len(times) / num_steps, sum(times) / num_steps) for name, times in kernels.items()),
            key=lambda kernel: -kernel.us,
        ),
        gaps=sorted(
            (Gap(*between, len(times) / num_steps, sum(times) / num_steps) for between, times in gaps.items()),
            key=lambda gap: -gap.us,
        ),
    )
