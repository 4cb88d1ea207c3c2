"""What a gateway costs: `python -m loadtest gateway` runs one before the fake engine and measures it.

The fake engine makes a token a stream and step at a set pace and logs when; the gateway is a process of its own whose
processor time is read from /proc. The client keeps the bytes with their times of arrival and reads them when the run is
over, so that it takes little from the two processes it shares the machine with.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import orjson

from loadtest.bench import raise_file_limit
from loadtest.delivery import Step, delays, read_steps
from loadtest.process import take_snapshot, use_between
from loadtest.servers import Pair
from loadtest.sse import DONE, EventParser
from loadtest.stats import Distribution, distribution, histogram

#: The fake engine's token of 15 bytes of text: an event with it is as long as one of a real model.
LONG_TOKEN, LONG_TEXT = 259, " implementation"

_PATH = "/v1/chat/completions"
_MODEL = "fake"
_WARMUP_TOKENS = 20


class GatewayBenchError(Exception):
    """A run is not what it has to be; the text says in what."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. Every stream is of `num_tokens` tokens."""

    streams: int = 256
    rate: float = 40.0  # tokens a second and stream
    num_tokens: int = 400
    latency_streams: int = 128
    full_speed_streams: int = 64
    first_writes: int = 40
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Paced:
    """Streams at a fixed pace: processor time of the gateway over the run, from before the first request on."""

    streams: int
    num_tokens: int
    num_events: int  # with text; one a token unless the gateway came late and joined two
    wall_s: float
    cpu_s: float
    cpu_us_per_token: float
    client_cpu_s: float
    others_share: float  # of the machine, taken by processes that are neither server nor client
    gateway_rss_mib: float
    send_to_client_s: Distribution | None  # None where tokens were joined
    send_to_client_histogram: Mapping[str, int]  # in the buckets of `stats.histogram`


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat."""

    started: str  # ISO 8601, UTC
    paced: Paced
    latency: Paced
    full_speed: Paced
    first_write_s: Distribution | None


@dataclass(slots=True)
class _Stream:
    """Receiver of one response: pieces and their times, unread."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def begin(self, status: int) -> None:
        self.status = status

    def feed(self, data: bytes, at: float) -> None:
        self.pieces.append((at, data))


@dataclass(frozen=True, slots=True)
class Read:
    """A finished stream: arrival times of its events with text, and the server's own count of tokens."""

    times: list[float]
    num_tokens: int


def read_stream(status: int, pieces: Sequence[tuple[float, bytes]], text: str) -> Read:
    """Raises GatewayBenchError for anything but a complete answer made of `text` over and over."""
    if status != 200:
        raise GatewayBenchError(f"status {status}: {b''.join(data for _, data in pieces)[:200]!r}")
    parser, times, answer, usage, done = EventParser(), list[float](), list[str](), None, False
    for at, data in pieces:
        for event in parser.feed(data):
            if event == DONE:
                done = True
                continue
            chunk = orjson.loads(event)
            usage = chunk.get("usage") or usage
            content = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            if content:
                times.append(at)
                answer.append(content)
    if not done or usage is None:
        raise GatewayBenchError(f"a stream ended after {len(times)} events without its usage")
    num_tokens = usage["completion_tokens"]
    if "".join(answer) != text * num_tokens:
        raise GatewayBenchError(f"a stream of {num_tokens} tokens has {sum(map(len, answer))} characters")
    return Read(times, num_tokens)


class _Bench:
    """One gateway and one engine that ends a step every `step_ms`, until the `async with` ends."""

    def __init__(self, plan: Plan, step_ms: float, folder: Path) -> None:
        self._log = folder / f"steps-{step_ms:g}.jsonl"
        num_seqs = max(plan.streams, plan.latency_streams, plan.full_speed_streams)
        self._pair = Pair(
            (
                "--backend=fake",
                f"--fake-step-ms={step_ms}",
                f"--fake-step-log={self._log}",
                "--fake-num-blocks=65536",
                f"--max-num-seqs={num_seqs}",
                "--max-num-batched-tokens=65536",
            )
        )

    async def __aenter__(self) -> Self:
        await self._pair.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pair.__aexit__(*error)

    async def ask(self, num_tokens: int) -> _Stream:
        stream = _Stream()
        await self._pair.client.post(_PATH, _body(num_tokens), stream)
        return stream

    async def paced(self, streams: int, num_tokens: int) -> Paced:
        """`streams` at once, and what they cost."""
        pid = self._pair.gateway.pid
        since = time.monotonic()
        before = take_snapshot((pid, self._pair.engine.pid))
        collected = await asyncio.gather(*(self.ask(num_tokens) for _ in range(streams)))
        after = take_snapshot((pid, self._pair.engine.pid))
        use = use_between(before, after)
        (gateway,) = (process for process in use.processes if process.pid == pid)
        reads = [read_stream(stream.status, stream.pieces, LONG_TEXT) for stream in collected]
        tokens, events = sum(read.num_tokens for read in reads), sum(len(read.times) for read in reads)
        found = delays(self._steps(since), [read.times for read in reads]) if tokens == events else []
        return Paced(
            streams=streams,
            num_tokens=tokens,
            num_events=events,
            wall_s=use.wall_s,
            cpu_s=gateway.cpu_s,
            cpu_us_per_token=gateway.cpu_s / tokens * 1e6,
            client_cpu_s=after.client_cpu_s - before.client_cpu_s,
            others_share=use.others_share,
            gateway_rss_mib=gateway.memory_mib.rss,
            send_to_client_s=distribution(found),
            send_to_client_histogram=histogram(found),
        )

    async def first_write(self) -> float:
        """Seconds from the engine's first step for one stream alone to its first event at the client."""
        since = time.monotonic()
        stream = await self.ask(2)
        read = read_stream(stream.status, stream.pieces, LONG_TEXT)
        return read.times[0] - self._steps(since)[0].at

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


async def measure(plan: Plan, report: Callable[[str], None]) -> list[Run]:
    """All repeats. Raises GatewayBenchError, LogMismatch, and what `Pair` raises."""
    raise_file_limit()
    runs = []
    for number in range(plan.repeats):
        started = datetime.now(UTC).isoformat(timespec="seconds")
        with TemporaryDirectory(prefix="sg-bench-") as folder:
            async with _Bench(plan, 1000 / plan.rate, Path(folder)) as bench:
                await bench.paced(plan.streams, _WARMUP_TOKENS)
                report(f"{number + 1}/{plan.repeats}: {plan.streams} streams at {plan.rate:g} tokens/s")
                paced = await bench.paced(plan.streams, plan.num_tokens)
                report(f"{number + 1}/{plan.repeats}: {plan.latency_streams} streams at {plan.rate:g} tokens/s")
                latency = await bench.paced(plan.latency_streams, plan.num_tokens)
                first = [await bench.first_write() for _ in range(plan.first_writes)]
            async with _Bench(plan, 0.0, Path(folder)) as bench:
                await bench.paced(plan.full_speed_streams, _WARMUP_TOKENS)
                report(f"{number + 1}/{plan.repeats}: {plan.full_speed_streams} streams at full speed")
                full = await bench.paced(plan.full_speed_streams, plan.num_tokens)
        runs.append(Run(started, paced, latency, full, distribution(first)))
    return runs
