"""What a model takes on a GPU through the whole control plane: `python -m loadtest gpu`.

Each model is measured by `LLM.generate` in a process of its own (`gpu_offline`), with random weights. Then the first
one is written to disk, started cold and warm, and asked over HTTP by clients in processes of their own (`gpu_clients`).
Nothing but the program's own defaults is set.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import orjson

from loadtest import gpu_steps
from loadtest.gpu_clients import Level
from loadtest.gpu_steps import Steps
from loadtest.machine import Hardware, read_code, read_hardware, read_versions
from loadtest.servers import Pair, TrialError
from loadtest.shapes import SHAPES, write_folder
from loadtest.stats import percentile

_START_TIMEOUT_S = 240.0  # of the first start, which compiles every kernel
_TOKENS = 128  # of a prompt and of an answer over HTTP
_CLIENTS_A_PROCESS = 64
_HEAD_START_S = 2.0  # for client processes to be up before they begin together


@dataclass(frozen=True, slots=True)
class HttpLevel:
    """So many clients at a time, before so many gateway processes on one port."""

    clients: int
    gateways: int
    requests: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Decode steps of a shape to be profiled: so many streams, after prompts of so many tokens."""

    shape: str
    streams: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `offline` names a shape and its measures, in `gpu_offline`'s words; `fastest` those that are
    made again with kernels of which a row's bits may depend on the batch.
    """

    offline: Mapping[str, Sequence[str]]
    fastest: Mapping[str, Sequence[str]]
    http: Sequence[HttpLevel]
    repeats: int
    device: str
    recording: Recording | None = None


LLAMA = (
    *(f"decode:{batch}" for batch in (1, 16, 64, 256)),
    *("prefill:1x8192", "prefill:16x2048", "ttft:128", "ttft:1024", "ttft:32768", "hit:8192", "tok_s"),
)
FASTEST = (*(f"decode:{batch}" for batch in (1, 16, 64, 256)), "prefill:16x2048")
QWEN = ("decode:1", "decode:64", "tok_s")
FULL = Plan(
    offline={"llama8b": LLAMA, "qwen06b": QWEN},
    fastest={"llama8b": FASTEST},
    http=(HttpLevel(64, 1, 512), HttpLevel(256, 2, 1024)),
    repeats=3,
    device="cuda",
    # Up to 80 tokens more when the last prompt is computed: contexts of some 1,024.
    recording=Recording("llama8b", 64, 960),
)

#: Where a measure's median goes in the results, by the first word of its name.
_PLACES: dict[str, Callable[[str], tuple[str, ...]]] = {
    "decode": lambda of: ("decode_ms", of),
    "prefill": lambda of: ("prefill_tok_s", of),
    "ttft": lambda of: ("ttft_ms", of),
    "hit": lambda of: ("ttft_ms", f"{of}_hit"),
    "tok_s": lambda of: ("offline_tok_s",),
    "load_s": lambda of: ("load_s",),
}


@dataclass(slots=True)
class Report:
    """`results` are medians by name, nested; `values` all measurements by dotted name; `steps` what was recorded, by
    shape and streams; `failures` the error of each part that did not come to its end.
    """

    command: list[str]
    started: str  # ISO 8601, UTC
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: Mapping[str, str]
    results: dict[str, object] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0

    def add(self, path: Sequence[str], values: Sequence[float]) -> None:
        """Takes in the repeats of one measure."""
        self.values[".".join(path)] = list(values)
        *branch, leaf = path
        place = self.results
        for name in branch:
            inner = place.setdefault(name, {})
            assert isinstance(inner, dict)
            place = inner
        place[leaf] = statistics.median(values)


def measure(
    plan: Plan, command: list[str], tell: Callable[[str], None], keep: Callable[[Report], None] | None = None
) -> Report:
    """Everything in `plan`. A part that fails is in the report with what it measured before, and the others go on.
    `keep` has the report after each part: a run that is cut off loses what it was about alone.
    """
    keep = keep or (lambda report: None)
    code = read_code()
    begun = time.monotonic()
    report = Report(
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=code.commit,
        dirty=code.dirty,
        hardware=read_hardware(),
        versions=read_versions(),
    )
    with TemporaryDirectory(prefix="sg-gpu-") as folder:
        for shape, measures in plan.offline.items():
            tell(f"{shape}: {' '.join(measures)}")
            with _failing_alone(shape, report, tell):
                _offline(plan, shape, measures, Path(folder), report, tell)
            keep(report)
        if plan.recording is not None:
            with _failing_alone("idle", report, tell):
                asyncio.run(_record(plan.recording, plan.device, Path(folder), report, tell))
            keep(report)
        if plan.http:
            with _failing_alone("http", report, tell):
                asyncio.run(_serve(plan, Path(folder), report, tell))
            keep(report)
        for shape, measures in plan.fastest.items():
            tell(f"{shape}, not reproducible: {' '.join(measures)}")
            with _failing_alone(f"{shape}, not reproducible", report, tell):
                _offline(plan, shape, measures, Path(folder), report, tell, reproducible=False)
            _add_costs(shape, measures, report)
    report.wall_s = round(time.monotonic() - begun, 1)
    keep(report)
    return report


@contextmanager
def _failing_alone(part: str, report: Report, tell: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it was, others are to be measured
        report.failures[part] = str(error) or repr(error)
        tell(f"{part} failed: {error}")


def _offline(
    plan: Plan,
    shape: str,
    measures: Sequence[str],
    folder: Path,
    report: Report,
    tell: Callable[[str], None],
    *,
    reproducible: bool = True,
) -> None:
    model = folder / shape
    write_folder(SHAPES[shape], model)
    flags = [f"--vocab={SHAPES[shape].vocab - 1}", f"--repeats={plan.repeats}", f"--device={plan.device}"]
    flags += [] if reproducible else ["--no-reproducible"]
    for line in _lines_of_child("gpu_offline", str(model), *measures, *flags):
        found = orjson.loads(line)
        place = _place(shape, found["name"])
        report.add(place if reproducible else ("fastest", *place), found["values"])
        tell(f"  {found['name']}: {', '.join(f'{value:.5g}' for value in found['values'])}")


def _place(shape: str, measure: str) -> tuple[str, ...]:
    """Where a shape's measure goes in the results."""
    kind, _, of = measure.partition(":")
    return shape, *_PLACES[kind](of)


def _add_costs(shape: str, measures: Sequence[str], report: Report) -> None:
    """In percent of time, what is lost to reproducibility, where both were measured."""
    for measure in measures:
        kind, _, of = measure.partition(":")
        name = ".".join(_place(shape, measure))
        if name in report.values and f"fastest.{name}" in report.values:
            default, fastest = (statistics.median(report.values[key]) for key in (name, f"fastest.{name}"))
            slower = default / fastest if kind == "decode" else fastest / default
            report.add(("reproducible_cost", of if kind == "decode" else kind), [100.0 * (slower - 1.0)])


def _child(module: str, *arguments: str) -> bytes:
    """What `python -m loadtest.MODULE` prints. Raises TrialError with the end of its errors."""
    return b"".join(_lines_of_child(module, *arguments))


def _lines_of_child(module: str, *arguments: str) -> Iterator[bytes]:
    """The same line by line, as it comes."""
    with TemporaryFile() as errors:
        command = [sys.executable, "-m", f"loadtest.{module}", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child:
            assert child.stdout is not None
            yield from child.stdout
        if child.returncode:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            raise TrialError(f"{module} {' '.join(arguments)}:\n{text[-2000:]}")


async def _record(recording: Recording, device: str, folder: Path, report: Report, tell: Callable[[str], None]) -> None:
    """How long the device waits while streams decode, and for what: from a trace of the engine behind a gateway."""
    shape, streams, model, traces = (
        SHAPES[recording.shape],
        recording.streams,
        folder / recording.shape,
        folder / "steps",
    )
    write_folder(shape, model)
    tell(f"{recording.shape}: a profile of steps of {streams} streams")

    def body(number: int) -> bytes:
        return gpu_steps.request(str(model), shape.vocab - 1, recording.prompt_tokens, number)

    flags = (str(model), f"--device={device}", "--load-format=dummy", f"--profile-dir={traces}")
    async with Pair(flags, start_timeout_s=_START_TIMEOUT_S) as pair:
        steps = gpu_steps.read(await gpu_steps.record(pair, body, streams, traces))
    report.steps[f"{recording.shape}.{streams}"] = steps
    report.add((recording.shape, "idle_percent", str(streams)), [steps.idle_percent])
    tell(f"  {steps.num_steps} steps of {steps.step_us:,.0f} us, {steps.idle_percent:.3g} % idle")


async def _serve(plan: Plan, folder: Path, report: Report, tell: Callable[[str], None]) -> None:
    """Starts of the first model from its files, which the page cache holds; then HTTP, a start for each level."""
    shape = next(iter(plan.offline))
    model = folder / f"{shape}-weights"
    tell(f"{shape}: writing weights")
    await asyncio.to_thread(_child, "shapes", shape, str(model))
    engine_flags = (str(model), f"--device={plan.device}", f"--cache-dir={folder / 'cache'}")
    tell("start without compiled kernels")
    begun = time.monotonic()
    async with Pair(engine_flags, start_timeout_s=_START_TIMEOUT_S):
        report.add(("startup_s", "cold"), [time.monotonic() - begun])
    warm = []
    for level in plan.http:
        tell(f"start, then {level.clients} clients of {level.gateways} gateway processes")
        begun = time.monotonic()
        async with Pair(engine_flags, (f"--workers={level.gateways}",), start_timeout_s=_START_TIMEOUT_S) as pair:
            warm.append(time.monotonic() - begun)
            await _http(pair, str(model), SHAPES[shape].vocab - 1, level, plan.repeats, report)
        tell(f"  {report.values[f'http.tok_s.{level.clients}']} tokens/s")
    report.add(("startup_s", "warm"), warm)


async def _http(pair: Pair, model: str, vocab: int, level: HttpLevel, repeats: int, report: Report) -> None:
    rates, gaps, firsts = [], [], []
    for repeat in range(repeats + 1):
        runs = await _clients(pair.url, model, vocab, level, seed=repeat * 1000)
        if not repeat:  # it warms up
            continue
        wall_s = max(run.ended for run in runs) - min(run.began for run in runs)
        rates.append(sum(run.num_tokens for run in runs) / wall_s)
        gaps.append(1e3 * percentile(sorted(gap for run in runs for gap in run.itl_s), 99))
        firsts.append(1e3 * percentile(sorted(first for run in runs for first in run.ttft_s), 50))
    report.add(("http", "tok_s", str(level.clients)), rates)
    report.add(("http", "itl_p99_ms", str(level.clients)), gaps)
    report.add(("http", "ttft_p50_ms", str(level.clients)), firsts)


async def _clients(url: str, model: str, vocab: int, level: HttpLevel, seed: int) -> list[Level]:
    """The output of each client process; all begin at one moment."""
    processes = -(-level.clients // _CLIENTS_A_PROCESS)
    begin = time.monotonic() + _HEAD_START_S
    share = [f"--clients={level.clients // processes}", f"--requests={level.requests // processes}"]
    tokens = [f"--prompt-tokens={_TOKENS}", f"--output-tokens={_TOKENS}", f"--vocab={vocab}"]
    flags = [url, f"--model={model}", f"--at={begin}", *share, *tokens]
    children = (
        asyncio.to_thread(_child, "gpu_clients", *flags, f"--seed={seed + number}") for number in range(processes)
    )
    return [Level(**orjson.loads(printed)) for printed in await asyncio.gather(*children)]
