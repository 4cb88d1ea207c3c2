"""What a gateway costs: `python -m loadtest gateway` runs one before the fake engine and measures it.

The fake engine makes a token a stream and step at a set pace and logs when it sends; the gateway is a process of its
own whose processor time is read from /proc. The client keeps the bytes with their times of arrival and reads them when
the run is over, so that it takes little from the two processes it shares the machine with.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import orjson

from loadtest.bench import raise_file_limit
from loadtest.delivery import Step, delays, read_steps
from loadtest.machine import Code, Hardware, read_code, read_hardware, read_versions
from loadtest.process import take_snapshot, use_between
from loadtest.reading import Reads, StreamClient, parse
from loadtest.servers import Pair, TrialError
from loadtest.sse import DONE, EventParser
from loadtest.stats import Distribution, distribution, histogram

#: The fake engine's token of 15 bytes of text: an event with it is as long as one of a real model.
LONG_TOKEN, LONG_TEXT = 259, " implementation"

_PATH = "/v1/chat/completions"
_MODEL = "fake"
_WARMUP_TOKENS = 20
#: Paced streams begin over this time: hundreds of requests at one moment are another measurement.
RAMP_S = 2.0

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. Every stream is of `num_tokens` tokens."""

    streams: int = 256
    rate: float = 40.0  # tokens a second and stream
    num_tokens: int = 400
    latency_streams: int = 128
    full_speed_streams: int = 64
    first_writes: int = 50
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Streams, and what they cost the gateway from before the first request to the last byte.

    `send_to_client_s` is from just before the engine encodes and sends a step to the client's read, of every token;
    None without a pace.
    """

    streams: int
    num_tokens: int
    num_events: int  # with text; one a token unless the gateway or the client came late and tokens were joined
    wall_s: float
    tokens_per_s: float
    cpu_s: float  # user + system
    cpu_us_per_token: float
    engine_cpu_s: float
    client_cpu_s: float
    others_share: float  # of the machine, taken by processes that belong to none of the three
    rss_mib: float
    send_to_client_s: Distribution | None
    send_to_client_histogram: Mapping[str, int]  # in the buckets of `stats.histogram`


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat. `first_write_s` is `send_to_client_s` of the first tokens of requests made one after the other."""

    started: str  # ISO 8601, UTC
    paced: Cost
    latency: Cost
    full_speed: Cost
    first_write_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Report:
    schema_version: int
    command: list[str]
    code: Code
    hardware: Hardware
    versions: Mapping[str, str]
    plan: Plan
    runs: list[Run]

    @property
    def has_joined_tokens(self) -> bool:
        """Whether a paced stream got fewer events than tokens."""
        return any(cost.num_events != cost.num_tokens for run in self.runs for cost in (run.paced, run.latency))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When each token of a stream arrived, and in how many events."""

    times: list[float]
    num_events: int


def read_stream(status: int, pieces: Sequence[tuple[float, bytes]]) -> Arrivals:
    """Raises TrialError for anything but a complete answer of as many long tokens as its usage says."""
    if status != 200:
        raise TrialError(f"status {status}: {b''.join(data for _, data in pieces)[:200]!r}")
    parser, times, num_events, usage, done = EventParser(), list[float](), 0, None, False
    for at, data in pieces:
        for event in parser.feed(data):
            if event == DONE:
                done = True
                continue
            chunk = orjson.loads(event)
            if "error" in chunk:
                raise TrialError(f"a stream ended with an error: {chunk['error']}")
            usage = chunk.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            num_tokens = len(text) // len(LONG_TEXT)
            if text != LONG_TEXT * num_tokens:
                raise TrialError(f"an event has the text {text[:200]!r}, which is not the long token's")
            times += [at] * num_tokens
            num_events += num_tokens > 0
    if not done or usage is None:
        raise TrialError(f"a stream ended after {num_events} events without its usage")
    if usage["completion_tokens"] != len(times):
        raise TrialError(f"{usage['completion_tokens']} tokens were generated, {len(times)} came")
    return Arrivals(times, num_events)


def _arrivals(reads: Reads) -> Arrivals:
    response = parse(reads)
    return read_stream(response.status, response.pieces)


class _Bench:
    """One gateway and one engine that ends a step every `step_ms`, until the `async with` ends."""

    def __init__(self, plan: Plan, step_ms: float, folder: Path) -> None:
        self._step_ms = step_ms
        self._log = folder / f"steps-{step_ms:g}.jsonl"
        num_seqs = max(plan.streams, plan.latency_streams, plan.full_speed_streams)
        self._pair = Pair(
            (
                "--backend=fake",
                f"--fake-step-ms={step_ms}",
                f"--step-log={self._log}",
                "--fake-depth=2",  # else the time to plan a step adds to the pace
                "--fake-num-blocks=65536",
                f"--max-num-seqs={num_seqs}",
                "--max-num-batched-tokens=65536",
            )
        )

        self._client = StreamClient("127.0.0.1", self._pair.http_port)

    async def __aenter__(self) -> Self:
        await self._pair.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.close()
        await self._pair.__aexit__(*error)

    async def _ask(self, num_tokens: int, delays_s: Sequence[float]) -> list[Reads]:
        return await asyncio.to_thread(self._client.post, _PATH, _body(num_tokens), delays_s)

    async def cost(self, streams: int, num_tokens: int) -> Cost:
        """What `streams` cost. Without a pace they begin at once, and no token can be matched with its step."""
        gateway, engine = self._pair.gateway.pid, self._pair.engine.pid
        since = time.monotonic()
        before = take_snapshot((gateway, engine))
        gap_s = RAMP_S / streams if self._step_ms else 0.0
        collected = await self._ask(num_tokens, [number * gap_s for number in range(streams)])
        after = take_snapshot((gateway, engine))
        use = use_between(before, after)
        processes = {process.pid: process for process in use.processes}
        arrivals = [_arrivals(reads) for reads in collected]
        delivered = delays(self._steps(since), [each.times for each in arrivals]) if self._step_ms else []
        cpu_s, total = processes[gateway].cpu_s, sum(len(each.times) for each in arrivals)
        return Cost(
            streams=streams,
            num_tokens=total,
            num_events=sum(each.num_events for each in arrivals),
            wall_s=use.wall_s,
            tokens_per_s=total / use.wall_s,
            cpu_s=cpu_s,
            cpu_us_per_token=cpu_s / total * 1e6,
            engine_cpu_s=processes[engine].cpu_s,
            client_cpu_s=after.client_cpu_s - before.client_cpu_s,
            others_share=use.others_share,
            rss_mib=processes[gateway].memory_mib.rss,
            send_to_client_s=distribution(delivered),
            send_to_client_histogram=histogram(delivered),
        )

    async def first_write(self) -> float:
        """Seconds from the send of the first step for one stream alone to its first event at the client."""
        since = time.monotonic()
        (reads,) = await self._ask(2, [0.0])
        return _arrivals(reads).times[0] - self._steps(since)[0].at

    def _steps(self, since: float) -> list[Step]:
        return [step for step in read_steps(self._log) if step.at >= since and step.num_sampled]


def _body(num_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": _MODEL,
            "messages": [{"role": "user", "content": "Go."}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "allowed_token_ids": [LONG_TOKEN],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def measure(plan: Plan, command: list[str], tell: Callable[[str], None]) -> Report:
    """All repeats; `tell` hears what is going on. Raises ServerFailed, and TrialError for a run that is not whole."""
    raise_file_limit()
    runs = []
    for number in range(1, plan.repeats + 1):
        tell(f"repeat {number} of {plan.repeats}")
        with TemporaryDirectory(prefix="sg-bench-") as folder:
            runs.append(await _run(plan, Path(folder)))
    return Report(
        schema_version=SCHEMA_VERSION,
        command=command,
        code=read_code(),
        hardware=read_hardware(),
        versions=read_versions(),
        plan=plan,
        runs=runs,
    )


async def _run(plan: Plan, folder: Path) -> Run:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    async with _Bench(plan, 1000 / plan.rate, folder) as bench:
        await bench.cost(plan.streams, _WARMUP_TOKENS)
        paced = await bench.cost(plan.streams, plan.num_tokens)
        latency = await bench.cost(plan.latency_streams, plan.num_tokens)
        first_writes = [await bench.first_write() for _ in range(plan.first_writes)]
    async with _Bench(plan, 0.0, folder) as bench:
        await bench.cost(plan.full_speed_streams, _WARMUP_TOKENS)
        full_speed = await bench.cost(plan.full_speed_streams, plan.num_tokens)
    return Run(started, paced, latency, full_speed, distribution(first_writes))
