"""When requests go out: an open loop at given times, or a closed loop of as many at a time."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from loadtest.client import Outcome
from loadtest.workload import Prompt

Send = Callable[[Prompt], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests arrive at `rate` per second whatever the server does: its queue shows in the numbers."""

    rate: float
    burst_size: int = 1


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A new request goes out when one of `concurrency` ends: a slow server is asked less."""

    concurrency: int


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class Limits:
    """The last request goes out at whichever comes first; those on their way are waited for."""

    num_requests: int | None
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run: `due_at` is when it was to go out (perf_counter), in a closed loop when it did."""

    prompt: Prompt
    due_at: float
    outcome: Outcome


Report = Callable[[Request], None]


async def run_open(
    send: Send, prompts: Iterator[Prompt], arrivals: Iterator[float], limits: Limits, report: Report
) -> list[Request]:
    """Sends each prompt at its arrival time (seconds from now), and returns when the last one ended."""
    requests: list[Request] = []
    start = time.perf_counter()

    async def one(prompt: Prompt, due_at: float) -> None:
        requests.append(Request(prompt, due_at, await send(prompt)))
        report(requests[-1])

    async with asyncio.TaskGroup() as group:
        for prompt, arrival in itertools.islice(zip(prompts, arrivals, strict=False), limits.num_requests):
            if limits.duration_s is not None and arrival > limits.duration_s:
                break
            delay = start + arrival - time.perf_counter()
            # Also when it is late: the requests before it have to get their turn.
            await asyncio.sleep(max(0.0, delay))
            group.create_task(one(prompt, start + arrival))
    return requests


async def run_closed(
    send: Send, prompts: Iterator[Prompt], concurrency: int, limits: Limits, report: Report
) -> list[Request]:
    """Keeps `concurrency` requests on their way, and returns when the last one ended."""
    requests: list[Request] = []
    start = time.perf_counter()
    todo = itertools.islice(prompts, limits.num_requests)

    async def worker() -> None:
        while limits.duration_s is None or time.perf_counter() - start < limits.duration_s:
            prompt = next(todo, None)
            if prompt is None:
                return
            due_at = time.perf_counter()
            requests.append(Request(prompt, due_at, await send(prompt)))
            report(requests[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return requests
