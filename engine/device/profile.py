"""A profile of steps, taken from a running engine when its operator asks for one."""

from __future__ import annotations

import gzip
import logging
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from torch.autograd.profiler import profile, record_function

from engine.plan import ModelInfo, Progress, Runner, StepPlan, StepResult

log = logging.getLogger("engine")

#: Steps of a recording: half a second of an 8B model at 64 requests, in a file of less than a megabyte.
NUM_STEPS = 64

#: A recording of fewer steps ends when the device had nothing to do for so long; looked at once a second.
IDLE_S = 5.0
_LOOK_S = 1.0

#: Each step of a CPU is an event of this category: its layers are one native call, which is none of torch's operators.
_STEP = "user_annotation"


class ProfiledRunner:
    """`engine.plan.Runner` around another one. After `ask`, the next NUM_STEPS steps go into
    FOLDER/steps-FIRST-LAST.json.gz, a Chrome trace.

    The trace has all of these steps and nothing of others: it begins and ends while none is in flight, for which
    `max_in_flight` is 1 for a moment. What goes wrong with a recording is logged and disturbs no request.
    """

    def __init__(self, runner: Runner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder
        self._asked = False
        self._recording: profile | None = None
        self._first = self._launched = self._collected = 0  # of the recording
        self._in_flight = 0
        self._idle_since = 0.0

    @property
    def max_in_flight(self) -> int:
        return 1 if self._asked or self._launched == NUM_STEPS else self._runner.max_in_flight

    def load(self, progress: Progress) -> ModelInfo:
        return self._runner.load(progress)

    def launch(self, plan: StepPlan) -> None:
        self._in_flight += 1  # first of all: `end_if_idle` may come between any two lines
        if self._asked and self._in_flight == 1:
            self._begin(plan.step)
        if self._recording is not None:
            self._launched += 1
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        if self._recording is None:
            result = self._runner.collect()
        else:
            with record_function(f"step {self._first + self._collected}"):
                result = self._runner.collect()
            self._collected += 1
        self._idle_since = time.monotonic()
        self._in_flight -= 1
        if self._collected == NUM_STEPS:
            self._end()
        return result

    def close(self) -> None:
        self._end()
        self._runner.close()

    # --- called by handlers of signals, between any two lines of the above -------------------------

    def ask(self) -> None:
        """Record the steps from the next one on. While that is wanted already, or done, nothing but a line of log."""
        if self._asked or self._recording is not None:
            log.warning("profile_ignored", extra={"reason": "steps are being recorded already"})
            return
        self._asked = True

    def end_if_idle(self) -> bool:
        """End a recording that gets no more steps. False where none is wanted or under way."""
        if self._in_flight == 0 and time.monotonic() - self._idle_since >= IDLE_S:
            self._end()
        return self._asked or self._recording is not None

    # ------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        # A GPU's kernels alone: noting operators as well would slow the host down, and leave the device waiting.
        # `torch.profiler`, a layer above, imports a compiler when it begins: two seconds in which no token comes.
        on_gpu = torch.cuda.is_initialized()
        try:
            recording = profile(use_cpu=not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True)
            recording.__enter__()
        except RuntimeError as error:
            log.error("profile_failed", extra={"reason": str(error)})
        else:
            self._first, self._recording = step, recording
            log.info("profile_begun", extra={"first_step": step})
        self._asked = False

    def _end(self) -> None:
        """Write what was recorded, if anything is."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        steps = self._collected
        self._launched = self._collected = 0
        began = time.monotonic()
        path = self._folder / f"steps-{self._first}-{self._first + max(1, steps) - 1}.json.gz"
        try:
            recording.__exit__(None, None, None)
            idle = idle_share(_write(recording, path))
        except (OSError, RuntimeError, ValueError) as error:
            log.error("profile_failed", extra={"path": str(path), "reason": str(error)})
            return
        told = {"path": str(path), "steps": steps, "seconds": round(time.monotonic() - began, 3)}
        log.info("profile_written", extra=told | {"idle_percent": None if idle is None else round(100 * idle, 2)})


def listen(runner: ProfiledRunner) -> None:
    """SIGUSR2 asks `runner` for a recording, and until it is there a timer (SIGALRM) looks whether the engine is idle.

    Handlers run in the main thread, which is the step loop's: torch ends a recording where it began it.
    """

    def ask(*_: object) -> None:
        runner.ask()
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)

    def look(*_: object) -> None:
        if not runner.end_if_idle():
            signal.setitimer(signal.ITIMER_REAL, 0)

    signal.signal(signal.SIGALRM, look)
    signal.signal(signal.SIGUSR2, ask)


def idle_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Of the time from the begin of the first kernel to the end of the last, the share in which none ran; a CPU's
    steps count as kernels. None where there are none. `events` are those of a Chrome trace, times in microseconds.
    """
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], _STEP: []}
    for event in events:
        if event.get("cat") in spans:
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    busy = sorted(spans["kernel"] or spans[_STEP])
    if not busy:
        return None
    first = end = busy[0][0]
    idle = 0.0
    for begin, until in busy:
        idle += max(0.0, begin - end)
        end = max(end, until)
    return idle / (end - first) if end > first else 0.0


def _write(recording: profile, path: Path) -> list[dict[str, Any]]:
    """The trace as torch writes it, compressed, under its name only when whole; its events."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".steps-") as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        recording.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        packed.write_bytes(gzip.compress(text, compresslevel=1))
        packed.replace(path)
    events: list[dict[str, Any]] = orjson.loads(text)["traceEvents"]
    return events
