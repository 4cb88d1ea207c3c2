"""An engine and a gateway under steady load that some clients leave: memory must not grow, no block be lost.

First the capacity is measured with more requests than the engine runs at a time; then requests arrive at a share of
it, and the resident memory of both processes is sampled.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from loadtest.asking import Asked, ask
from loadtest.machine import read_code, read_hardware, read_versions
from loadtest.matrix import COMPLETIONS
from loadtest.process import take_snapshot
from loadtest.servers import Pair, TrialError
from loadtest.workload import WORDS, arrivals

SCHEMA_VERSION = 1

CAPACITY_S = 8.0
SAMPLE_S = 1.0
#: Caches, pools and the allocator fill at first: the slope is taken over what comes after this share.
WARM_SHARE = 0.3
IDLE_WITHIN_S = 10.0
#: Growth over the measured part that counts as none, whatever the noise: the gateway's allocators settle by 0.4 MiB,
#: the engine's by 0.1, ever more slowly, while the objects of the interpreter stay as many. A leak of 200 bytes a
#: request is more in ten minutes.
LEAST_GROWTH_MIB = 0.5


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """`load` is the share of the capacity that arrives, `leaving` the share of clients that hang up in mid-stream."""

    engine_flags: tuple[str, ...]
    gateway_flags: tuple[str, ...]
    duration_s: float
    load: float
    leaving: float
    output_tokens: int  # mean; sizes are even in half to one and a half of it
    concurrency: int  # of the measurement of capacity: more than the engine runs at a time
    seed: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process over the measured part. `growth` is the fitted line's, end over start."""

    first_mib: float
    last_mib: float
    growth_mib: float
    noise_mib: float  # standard deviation around the line
    slope_kib_per_min: float
    samples_mib: list[float]  # one a second, from the very start

    @property
    def grows(self) -> bool:
        return self.growth_mib > max(LEAST_GROWTH_MIB, 3 * self.noise_mib)


@dataclass(frozen=True, slots=True)
class Report:
    schema_version: int
    command: list[str]
    code: Any
    hardware: Any
    versions: Any
    config: SoakConfig
    capacity_requests_per_s: float
    num_requests: int
    num_left: int
    failures: dict[str, int]
    memory: dict[str, Memory]
    idle_after_s: float | None  # None: blocks or requests stayed at the engine
    engine_aborts: int

    @property
    def passed(self) -> bool:
        clean = not self.failures and self.idle_after_s is not None
        return clean and not any(memory.grows for memory in self.memory.values())


async def soak(config: SoakConfig, command: list[str]) -> Report:
    """The whole run. Raises ServerFailed or TrialError."""
    rng = random.Random(config.seed)
    async with Pair(config.engine_flags, config.gateway_flags) as pair:
        capacity = await _capacity(pair, config, rng)
        samples: dict[str, list[float]] = {"engine": [], "gateway": []}
        sampler = asyncio.create_task(_sample(pair, samples))
        try:
            asked, num_left = await _load(pair, config, config.load * capacity, rng)
        finally:
            sampler.cancel()
            await asyncio.wait({sampler})
        idle_after_s = await pair.idle_within(IDLE_WITHIN_S)
        aborts = round(await pair.engine_metric("num_aborts_total"))
    return Report(
        schema_version=SCHEMA_VERSION,
        command=command,
        code=asdict(read_code()),
        hardware=asdict(read_hardware()),
        versions=read_versions(),
        config=config,
        capacity_requests_per_s=round(capacity, 2),
        num_requests=len(asked) + num_left,
        num_left=num_left,
        failures=dict(Counter(failure for one in asked if (failure := _failure(one)))),
        memory={name: fit(values) for name, values in samples.items()},
        idle_after_s=None if idle_after_s is None else round(idle_after_s, 3),
        engine_aborts=aborts,
    )


def _body(config: SoakConfig, rng: random.Random) -> dict[str, Any]:
    """A streamed request whose prompt no other has, so that the prefix cache turns over."""
    least, most = max(2, config.output_tokens // 2), config.output_tokens * 3 // 2
    return {
        "prompt": " ".join(rng.choices(WORDS, k=rng.randrange(4, 24))),
        "max_tokens": rng.randint(least, max(least, most)),
        "ignore_eos": True,
        "temperature": 0.9,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _capacity(pair: Pair, config: SoakConfig, rng: random.Random) -> float:
    """Requests a second with `concurrency` at a time."""
    started, num_done = time.monotonic(), 0

    async def worker() -> None:
        nonlocal num_done
        while time.monotonic() < started + CAPACITY_S:
            asked = await ask(pair.client, COMPLETIONS, _body(config, rng))
            if failure := _failure(asked):
                raise TrialError(f"a request failed while the capacity was measured: {failure}")
            num_done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(config.concurrency):
            group.create_task(worker())
    return num_done / (time.monotonic() - started)


async def _load(pair: Pair, config: SoakConfig, rate: float, rng: random.Random) -> tuple[list[Asked], int]:
    """How those ended that stayed, and how many left."""
    asked, num_left = list[Asked](), 0

    async def one(body: dict[str, Any], leave_at: int | None) -> None:
        nonlocal num_left
        enough = asyncio.Event()

        def on_tokens(num_tokens: int) -> None:
            if leave_at is not None and num_tokens >= leave_at:
                enough.set()

        request = asyncio.create_task(ask(pair.client, COMPLETIONS, body, on_tokens))
        leaving = asyncio.create_task(enough.wait())
        await asyncio.wait({request, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if request.done():
            asked.append(request.result())
        else:
            request.cancel()  # closes the connection
            num_left += 1
        await asyncio.wait({request, leaving})

    start = time.monotonic()
    bar = tqdm(total=round(config.duration_s), desc="soak", unit="s", disable=None, leave=False)
    async with asyncio.TaskGroup() as group:
        for due in itertools.takewhile(lambda due: due < config.duration_s, arrivals(rate, 1, config.seed)):
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            body = _body(config, rng)
            leaves = rng.random() < config.leaving
            group.create_task(one(body, rng.randrange(1, body["max_tokens"]) if leaves else None))
            bar.update(round(due) - bar.n)
    bar.close()
    return asked, num_left


def _failure(asked: Asked) -> str:
    """Empty for a whole answer."""
    answer = asked.answer
    if answer is None:
        return asked.failure
    if answer.error is not None:
        return f"error event: {answer.error.get('message')}"
    return "" if answer.choices and answer.choices[0].finish_reason else "no finish_reason"


async def _sample(pair: Pair, samples: dict[str, list[float]]) -> None:
    while True:
        tree = take_snapshot((pair.engine.pid, pair.gateway.pid)).tree
        samples["engine"].append(round(tree[pair.engine.pid].memory.rss, 3))
        samples["gateway"].append(round(tree[pair.gateway.pid].memory.rss, 3))
        await asyncio.sleep(SAMPLE_S)


def fit(samples_mib: Sequence[float]) -> Memory:
    """A line through what came after the warm part. Raises TrialError for fewer than three samples there."""
    measured = samples_mib[int(len(samples_mib) * WARM_SHARE) :]
    if len(measured) < 3:
        raise TrialError(f"{len(samples_mib)} samples of memory are too few for a slope: soak for longer")
    times = [SAMPLE_S * number for number in range(len(measured))]
    slope, intercept = statistics.linear_regression(times, measured)
    residuals = [value - (intercept + slope * at) for at, value in zip(times, measured, strict=True)]
    return Memory(
        first_mib=measured[0],
        last_mib=measured[-1],
        growth_mib=round(slope * times[-1], 3),
        noise_mib=round(statistics.pstdev(residuals), 3),
        slope_kib_per_min=round(slope * 60 * 1024, 1),
        samples_mib=list(samples_mib),
    )


def table(report: Report) -> str:
    """Markdown."""
    config = report.config
    lines = [
        f"{config.duration_s:g} s at {config.load:.0%} of {report.capacity_requests_per_s:g} requests a second: "
        f"{report.num_requests} requests, {report.num_left} left in mid-stream ({report.engine_aborts} aborts at the "
        f"engine), {sum(report.failures.values())} failed.",
        "",
        "| process | resident memory (MiB) | slope (KiB a minute) | growth by the line (MiB) | noise (MiB) |",
        "|---|---|---|---|---|",
    ]
    for name, memory in report.memory.items():
        lines.append(
            f"| {name} | {memory.first_mib:.1f} to {memory.last_mib:.1f} | {memory.slope_kib_per_min:+.1f} "
            f"| {memory.growth_mib:+.2f}{' **grows**' if memory.grows else ''} | {memory.noise_mib:.2f} |"
        )
    idle = "requests or blocks **stayed at the engine**"
    if report.idle_after_s is not None:
        idle = f"every block was free {report.idle_after_s:.2f} s later"
    lines += ["", f"After the last request {idle}."]
    lines += [f"- {count} times: {failure}" for failure, count in report.failures.items()]
    return "\n".join(lines) + "\n"
