"""A tallied histogram shows what prometheus_client's own does."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from protocol.tally import Stopwatch, TalliedHistogram, Tally

BOUNDS = (2**-9, 2**-6, 0.5, 8.0)


def test_a_tally_is_its_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_created_metrics()
    amounts = (0.0, 2**-10, 2**-9, 2**-8, 2**-5, 2**-5, 7.0, 8.0, 9.0, 400.0)
    registries = [CollectorRegistry(), CollectorRegistry()]
    one_by_one = Histogram("gap_seconds", "Gaps.", ("model",), registry=registries[0], buckets=BOUNDS)
    in_bulk = TalliedHistogram("gap_seconds", "Gaps.", ("model",), BOUNDS, registries[1])
    tally = in_bulk.labels("m")
    assert in_bulk.labels("m") is tally
    for number, amount in enumerate(amounts):
        one_by_one.labels("m").observe(amount)
        _lap(tally, amount, 1000 + number / 8, monkeypatch)
    # The first goes at once, the next when a second is over, the last waits.
    assert 'gap_seconds_count{model="m"} 9.0' in generate_latest(registries[1]).decode()
    tally.flush()
    tally.flush()
    one_by_one.labels("other").observe(1)
    _lap(in_bulk.labels("other"), 1.0, 1000.0, monkeypatch)
    assert generate_latest(registries[1]) == generate_latest(registries[0])


def _lap(tally: Tally, amount: float, now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two laps, `amount` apart."""
    stopwatch = Stopwatch()
    for at in (now - amount, now):
        monkeypatch.setattr(time, "perf_counter", lambda at=at: at)
        tally.lap(stopwatch)
    assert stopwatch.at == now


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    TalliedHistogram("gap_seconds", "Gaps.", (), BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Histogram("gap_seconds", "Gaps.", registry=registry)
