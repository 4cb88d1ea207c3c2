from __future__ import annotations

import pytest

from loadtest.servers import TrialError
from loadtest.soak import fit


def test_a_flat_line_after_the_warm_part_does_not_grow() -> None:
    memory = fit([10.0, 30.0, 50.0, *[60.0, 60.2, 59.8, 60.0, 60.1, 59.9, 60.0]])
    assert memory.first_mib == 60.0
    assert abs(memory.growth_mib) < 0.2
    assert not memory.grows


def test_a_leak_is_seen_through_noise() -> None:
    memory = fit([100 + 0.05 * second + (-1) ** second * 0.5 for second in range(100)])
    assert memory.slope_kib_per_min == pytest.approx(0.05 * 60 * 1024, rel=0.02)
    assert memory.growth_mib == pytest.approx(0.05 * 69, rel=0.03)
    assert memory.grows


@pytest.mark.parametrize(("mib", "grows"), [(0.4, False), (0.6, True)])
def test_a_quiet_line_may_settle_by_half_a_mebibyte(mib: float, grows: bool) -> None:
    memory = fit([45.0] * 180 + [45.0 + mib * second / 419 for second in range(420)])
    assert memory.growth_mib == pytest.approx(mib)
    assert memory.grows is grows


def test_a_run_that_is_too_short_is_said() -> None:
    with pytest.raises(TrialError, match="too few"):
        fit([1.0, 2.0])
