from __future__ import annotations

import pytest

from tests.fuzz.frames import fuzz


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_damaged_frames_are_refused_or_ignored_or_decoded(count: int) -> None:
    fuzzed = fuzz(seed=count, count=count)
    assert sum(fuzzed.outcomes.values()) == 2 * count
    assert min(fuzzed.outcomes.values()) > count // 100, "one of the outcomes hardly came: the damage is too dull"
    assert fuzzed.grown_mib < 32
