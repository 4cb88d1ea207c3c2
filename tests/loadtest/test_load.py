import asyncio
import time

import pytest

from loadtest.client import Outcome, TokenSource
from loadtest.load import Limits, Request, run_closed, run_open
from loadtest.workload import WORKLOADS, Prompt, arrivals, prompts


class SlowServer:
    """Answers after a fixed time and keeps count."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self.num_running = 0
        self.most_running = 0

    async def send(self, prompt: Prompt) -> Outcome:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        sent_at = time.perf_counter()
        await asyncio.sleep(self._takes_s)
        self.num_running -= 1
        now = time.perf_counter()
        return Outcome(sent_at, now, now, now, (), 1, 1, TokenSource.EVENTS, None, None, "stop", None)


async def test_closed_loop_keeps_its_concurrency() -> None:
    server, reported = SlowServer(0.02), list[Request]()
    asked = prompts(WORKLOADS["chat"], 1)
    requests = await run_closed(server.send, asked, 3, Limits(10, None), reported.append)
    assert len(requests) == len({request.prompt.text for request in requests}) == 10
    assert reported == requests
    assert server.most_running == 3


async def test_closed_loop_ends_with_its_duration() -> None:
    server, start = SlowServer(0.05), time.perf_counter()
    requests = await run_closed(server.send, prompts(WORKLOADS["chat"], 1), 2, Limits(None, 0.2), lambda _: None)
    assert time.perf_counter() - start >= 0.2
    assert 2 <= len(requests) <= 8  # fewer on a busy machine
    assert server.num_running == 0


async def test_open_loop_sends_on_time_whatever_the_server_does() -> None:
    server, times = SlowServer(0.3), [0.0, 0.0, 0.05, 0.1, 0.15]
    start = time.perf_counter()
    asked = prompts(WORKLOADS["chat"], 1)
    requests = await run_open(server.send, asked, iter([*times, 9.0]), Limits(5, None), lambda _: None)
    assert server.most_running == 5
    assert sorted(r.due_at - start for r in requests) == pytest.approx(times, abs=0.02)
    assert all(0 <= request.outcome.sent_at - request.due_at < 0.1 for request in requests)


async def test_open_loop_ends_with_its_duration() -> None:
    server = SlowServer(0.01)
    times = [at for at, _ in zip(arrivals(100.0, 1, 5), range(100), strict=False) if at <= 0.3]
    limits = Limits(None, 0.3)
    requests = await run_open(server.send, prompts(WORKLOADS["chat"], 1), arrivals(100.0, 1, 5), limits, lambda _: None)
    assert len(requests) == len(times)
    assert server.num_running == 0
