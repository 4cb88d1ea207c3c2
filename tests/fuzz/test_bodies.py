from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz.bodies import fuzz
from tests.fuzz.test_wire import resident_mib
from tests.processes import Engine, Server


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
async def test_odd_bodies_are_answered_and_stop_nobody(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server], count: int
) -> None:
    gateway = start_gateway(start_engine("--backend=fake", "--max-model-len=256").address)
    gateway.wait_until_ready()
    before = resident_mib(gateway)
    fuzzed = await fuzz(gateway.url, seed=count, count=count)
    assert fuzzed.faults == []
    assert sum(fuzzed.statuses.values()) == count
    assert {200, 400, 413} <= set(fuzzed.statuses)
    assert fuzzed.slowest_health_s < 0.5
    assert resident_mib(gateway) - before < 150
    assert "Traceback" not in gateway.output()
