"""The times of requests, as told by the events of steps."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.events import Ended, Entered, Event, Sampled
from engine.metrics import EngineMetrics
from engine.request import Request
from engine.status import Status
from protocol.messages import Admitted, Finished, FinishReason
from tests.engine.control import Driver, submit


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(Driver().resolved)


def shown(metrics: EngineMetrics, name: str) -> tuple[float, float]:
    """(count, sum) of a histogram."""
    families = text_string_to_metric_families(metrics.exposition(Status).decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return values[f"sluicegate:{name}_count"], values[f"sluicegate:{name}_sum"]


def request(handle: int) -> Request:
    return Request(1, submit(handle), eos_ids=(), context_length=100, sequence=1, now=0.0)


def entered(handle: int, *, at: float, queue_ms: int = 0) -> Event:
    return Entered(1, Admitted(handle, 16, queue_ms), at)


def ended(handle: int, reason: FinishReason) -> Event:
    return Ended(1, Finished(handle, reason, num_prompt=40, num_cached=16, num_generated=3))


def test_times_run_from_the_slot_to_the_first_token_and_on_to_the_last(metrics: EngineMetrics) -> None:
    one = request(5)
    metrics.observe_events([entered(5, at=10.0, queue_ms=250)], 10.0)
    metrics.observe_events([Sampled(one, 0, 7, 0)], 10.5)
    metrics.observe_events([Sampled(one, 1, 7, 0)], 10.75)
    metrics.observe_events([Sampled(one, 2, 7, 0), ended(5, FinishReason.LENGTH)], 12.0)
    assert shown(metrics, "request_queue_time_seconds") == (1, 0.25)
    assert shown(metrics, "request_prefill_time_seconds") == (1, 0.5)
    assert shown(metrics, "request_decode_time_seconds") == (1, 1.5)
    assert shown(metrics, "request_inference_time_seconds") == (1, 2.0)
    assert shown(metrics, "request_prefill_kv_computed_tokens") == (1, 24)


def test_a_resumed_request_begins_with_its_next_token(metrics: EngineMetrics) -> None:
    one = request(5)
    metrics.observe_events([entered(5, at=1.0), Sampled(one, 30, 7, 0), ended(5, FinishReason.STOP)], 1.5)
    assert shown(metrics, "request_prefill_time_seconds") == (1, 0.5)
    assert shown(metrics, "request_decode_time_seconds") == (1, 0)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_requests_that_were_cut_have_no_times(metrics: EngineMetrics, reason: FinishReason) -> None:
    metrics.observe_events([entered(5, at=1.0), Sampled(request(5), 0, 7, 0), ended(5, reason)], 2.0)
    metrics.observe_events([ended(6, reason)], 2.0)  # it never had a slot
    assert shown(metrics, "request_inference_time_seconds") == (0, 0)
    # Nothing is kept of them: the handle may come again.
    metrics.observe_events([entered(5, at=3.0), Sampled(request(5), 0, 7, 0), ended(5, FinishReason.STOP)], 4.0)
    assert shown(metrics, "request_inference_time_seconds") == (1, 1.0)
