"""EngineCore: the turn of the loop, what it shows, and how it ends. No sockets, no threads but one."""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.events import Delivery
from engine.inbox import Aborted, Drain, Inbox, OwnerLost, Submitted
from engine.metrics import EngineMetrics
from protocol.messages import Admitted, ErrorCode, Finished, FinishReason, Step, Submit, u32
from tests.engine.control import Driver, alone, submit


class Loop:
    def __init__(self, **values: object) -> None:
        driver = Driver(**values)  # for its runner and resolved settings
        self.inbox = Inbox()
        self.delivered: list[Delivery] = []
        self.metrics = EngineMetrics(driver.resolved)
        self.num_blocks = driver.resolved.info.num_blocks
        self.core = EngineCore(driver.resolved, driver.runner, self.inbox, self.delivered.extend, self.metrics)

    def submit(self, message: Submit, owner: int = 1) -> None:
        self.inbox.put(Submitted(owner, message))

    def settle(self) -> None:
        while self.core.step():
            pass
        self.core.tidy()

    def shows(self, line: str) -> bool:
        """Whether the metrics have it now."""
        return line in self.metrics.exposition(lambda: self.core.status).decode()

    def finished(self) -> list[Finished]:
        return [message for _, message in self.delivered if isinstance(message, Finished)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_submit_is_answered_with_admitted_steps_and_finished(depth):
    loop = Loop(fake_depth=depth)
    message = submit(5, max_tokens=4)
    loop.submit(message, owner=3)
    loop.settle()
    owners = {owner for owner, _ in loop.delivered}
    assert owners == {3}
    messages = [message for _, message in loop.delivered]
    assert messages[0] == Admitted(5, 0, 0)
    steps = messages[1:-1]
    assert all(isinstance(step, Step) for step in steps)
    assert [list(step.firsts) for step in steps] == [[0], [1], [2], [3]]
    assert u32([step.ids[0] for step in steps]) == alone(message)
    assert messages[-1] == Finished(5, FinishReason.LENGTH, 6, 0, 4)


def test_a_request_leaves_nothing_behind():
    """Once the pool was filled: not even in CPython's free lists."""
    loop = Loop(fake_num_blocks=32)
    first = submit(0, max_tokens=40)

    def serve(handles: range) -> int:
        for handle in handles:
            loop.submit(replace(first, handle=handle, prompt_ids=u32([handle] * 20)))
            loop.settle()
            loop.delivered.clear()
        gc.collect(1)  # a full collection would empty the free lists
        return sys.getallocatedblocks()

    before = serve(range(150))
    assert serve(range(150, 200)) - before < 40


def test_one_step_message_for_each_gateway_and_step():
    loop = Loop()
    for owner in (1, 2):
        for handle in range(3):
            loop.submit(submit(handle, max_tokens=2), owner)
    loop.settle()
    for owner in (1, 2):
        steps = [message for to, message in loop.delivered if to == owner and isinstance(message, Step)]
        assert [(step.step, list(step.handles)) for step in steps] == [(1, [0, 1, 2]), (2, [0, 1, 2])]


def test_abort_and_lost_gateways_come_through_the_inbox():
    loop = Loop()
    loop.submit(submit(1, max_tokens=100))
    loop.submit(submit(2, max_tokens=100), owner=2)
    loop.core.step()
    loop.inbox.put(Aborted(1, 1))
    loop.inbox.put(Aborted(1, 99))  # ended long ago, or never was
    loop.inbox.put(OwnerLost(2))
    loop.settle()
    assert [finished.reason for finished in loop.finished()] == [FinishReason.ABORT, FinishReason.ABORT]
    assert loop.core.status.totals.aborted == 2


def test_status_shows_the_moment():
    loop = Loop(fake_step_ms=5.0, fake_num_blocks=64)
    assert loop.core.status.free_blocks == 64
    loop.submit(submit(1, b"x" * 20, max_tokens=3))
    loop.core.step()
    loop.core.tidy()
    status = loop.core.status
    assert (status.step, status.running, status.waiting, status.free_blocks) == (1, 1, 0, 62)
    assert 0.005 <= status.longest_step_s < 1
    loop.settle()
    status = loop.core.status
    assert (status.step, status.running, status.free_blocks, status.busy_since) == (3, 0, 64, None)
    assert (status.totals.generated, status.totals.prompt, status.totals.finished) == (3, 20, 1)


def test_a_step_that_takes_long_is_seen_while_it_runs():
    loop = Loop(fake_step_ms=400.0)
    loop.submit(submit(1, max_tokens=1))
    thread = threading.Thread(target=loop.settle)
    started = time.monotonic()
    thread.start()
    time.sleep(0.1)
    busy_since = loop.core.status.busy_since
    assert busy_since is not None
    assert started <= busy_since <= started + 0.1
    thread.join()


def run_in_thread(loop: Loop) -> threading.Thread:
    thread = threading.Thread(target=loop.core.run, daemon=True)
    thread.start()
    return thread


def test_an_idle_loop_sleeps_and_wakes_for_what_arrives():
    loop = Loop()
    thread = run_in_thread(loop)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1
    loop.submit(submit(1, max_tokens=2))
    loop.inbox.put(Drain(time.monotonic() + 10))
    thread.join(5)
    assert not thread.is_alive()
    assert [finished.reason for finished in loop.finished()] == [FinishReason.LENGTH]


def test_an_idle_loop_has_freed_and_measured_what_it_computed():
    loop = Loop()
    run_in_thread(loop)
    loop.submit(submit(1, b"x" * 40, max_tokens=3))
    deadline = time.monotonic() + 5
    counted = 'sluicegate:generation_tokens_total{model_name="fake"} 3.0\n'
    while loop.core.status.free_blocks < loop.num_blocks or not loop.shows(counted):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert loop.shows('sluicegate:iteration_tokens_total_count{model_name="fake"} 3.0\n')
    loop.inbox.put(Drain(time.monotonic()))


@pytest.mark.parametrize("depth", [1, 2])
def test_metrics_forget_a_request_that_leaves_during_its_first_step(depth: int):
    loop = Loop(fake_depth=depth)
    for handle in range(5):
        loop.submit(submit(handle, max_tokens=9))
        loop.core.step()
        loop.inbox.put(Aborted(1, handle))
        loop.settle()
    assert not loop.metrics._lives


def test_drain_lets_requests_finish_until_its_deadline_and_fails_the_rest():
    loop = Loop(fake_step_ms=10.0)
    loop.submit(submit(1, max_tokens=3))
    loop.submit(submit(2, max_tokens=400))
    loop.inbox.put(Drain(time.monotonic() + 0.2))
    thread = run_in_thread(loop)
    thread.join(5)
    assert not thread.is_alive()
    first, second = loop.finished()
    assert (first.handle, first.reason) == (1, FinishReason.LENGTH)
    assert (second.handle, second.reason) == (2, FinishReason.ERROR)
    assert second.error is not None
    assert second.error.code is ErrorCode.DRAINING
    assert 5 < second.num_generated < 30


def test_metrics_show_totals_gauges_and_histograms():
    loop = Loop()
    loop.submit(submit(1, b"x" * 40, max_tokens=3))
    loop.settle()
    loop.submit(submit(2, b"x" * 40, max_tokens=30))
    for _ in range(3):
        loop.core.step()
    loop.core.tidy()
    text, again = (loop.metrics.exposition(lambda: loop.core.status).decode() for _ in range(2))
    assert again.count("\n") == text.count("\n")  # asking twice adds nothing
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sluicegate:"))
    label = '{model_name="fake"}'
    values = {
        name: float(lines[f"sluicegate:{name}{label}"])
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
            "num_aborts_total",
            "kv_cache_usage_perc",
            "step_duration_seconds_count",
            "iteration_tokens_total_sum",
            "request_queue_time_seconds_count",
            "request_prefill_time_seconds_count",
            "request_prefill_kv_computed_tokens_sum",
        )
    }
    assert values == {
        "num_requests_running": 1,
        "num_requests_waiting": 0,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 6,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 32,
        "num_preemptions_total": 0,
        "num_aborts_total": 0,
        "kv_cache_usage_perc": 3 / 64,
        "step_duration_seconds_count": 6,
        "iteration_tokens_total_sum": 40 + 2 + 8 + 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 1,
        "request_prefill_kv_computed_tokens_sum": 40,
    }
    info = '{block_size="16",enable_prefix_caching="True",model_name="fake",num_gpu_blocks="64"}'
    assert lines[f"sluicegate:cache_config_info{info}"] == "1.0"
