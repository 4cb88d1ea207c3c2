"""A tallied histogram shows what prometheus_client's own does."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from protocol.tally import TalliedHistogram

BOUNDS = (0.002, 0.01, 0.5, 10.0)


def test_a_tally_is_its_observations() -> None:
    disable_created_metrics()
    amounts = (0.0, 0.001, 0.002, 0.0021, 0.03, 0.03, 9.0, 10.0, 11.0, 400.0)
    registries = [CollectorRegistry(), CollectorRegistry()]
    one_by_one = Histogram("gap_seconds", "Gaps.", ("model",), registry=registries[0], buckets=BOUNDS)
    in_bulk = TalliedHistogram("gap_seconds", "Gaps.", ("model",), BOUNDS, registries[1])
    tally = in_bulk.labels("m")
    assert in_bulk.labels("m") is tally
    for number, amount in enumerate(amounts):
        one_by_one.labels("m").observe(amount)
        tally.observe(amount, now=100 + number / 8)
    # The first goes at once, the next when a second is over, the last waits.
    assert 'gap_seconds_count{model="m"} 9.0' in generate_latest(registries[1]).decode()
    tally.flush()
    tally.flush()
    one_by_one.labels("other").observe(1)
    in_bulk.labels("other").observe(1, 0)
    assert generate_latest(registries[1]) == generate_latest(registries[0])


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    TalliedHistogram("gap_seconds", "Gaps.", (), BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Histogram("gap_seconds", "Gaps.", registry=registry)
