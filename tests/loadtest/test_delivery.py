"""Steps and arrivals to delays: the right step is found, and what does not fit is said."""

from pathlib import Path

import pytest

from loadtest.delivery import Step, delays, read_steps
from loadtest.servers import TrialError


def steps(*num_sampled: int) -> list[Step]:
    """One every 25 ms from second 10 on."""
    return [Step(7 + index, 10 + 0.025 * index, count) for index, count in enumerate(num_sampled)]


def test_each_token_is_measured_from_its_own_step() -> None:
    early = [10.001, 10.0255, 10.052]
    late = [10.0251, 10.051, 10.0753]
    assert delays(steps(1, 2, 2, 1), [early, late]) == pytest.approx([0.001, 0.0005, 0.002, 0.0001, 0.001, 0.0003])


def test_tokens_later_than_a_step_are_found_as_long_as_one_of_the_stream_is_not() -> None:
    joined = [10.06, 10.06, 10.06, 10.076]
    assert delays(steps(1, 1, 1, 1), [joined]) == pytest.approx([0.06, 0.035, 0.01, 0.001])


def test_a_stream_that_was_always_late_does_not_pass_as_quick() -> None:
    with pytest.raises(TrialError, match="step 7 made 1 tokens, 0 arrivals fit it"):
        delays(steps(1, 1, 0), [[10.026, 10.051]])


def test_tokens_from_before_the_first_step_are_refused() -> None:
    with pytest.raises(TrialError, match="before any step"):
        delays(steps(1), [[9.9]])


def test_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    log.write_text('{"step": 3, "monotonic_ns": 1500000000, "num_tokens": 9, "num_sampled": 2}\n')
    assert read_steps(log) == [Step(3, 1.5, 2)]
