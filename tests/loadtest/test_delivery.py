"""Steps and arrivals to delays: each token is measured from its own step, and what does not fit is said."""

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
    assert delays(steps(1, 2, 2, 1), [late, early]) == pytest.approx([0.001, 0.0005, 0.002, 0.0001, 0.001, 0.0003])


def test_a_stream_that_is_always_late_by_a_whole_step_does_not_pass_as_quick() -> None:
    assert delays(steps(1, 2, 1), [[10.03, 10.06], [10.06, 10.09]]) == pytest.approx([0.03, 0.035, 0.035, 0.04])


def test_streams_may_follow_each_other() -> None:
    streams = [[10.0, 10.025], [10.051, 10.076], [10.052, 10.077]]
    assert delays(steps(1, 1, 2, 2), streams) == pytest.approx([0, 0, 0.001, 0.001, 0.002, 0.002])


def test_a_stream_that_stood_still_for_a_while_keeps_its_place() -> None:
    stood, quick = [10.001, 10.026, 10.2, 10.201], [10.027, 10.051, 10.076, 10.101]
    assert delays(steps(1, 2, 2, 2, 1), [quick, stood]) == pytest.approx(
        [0.001, 0.001, 0.15, 0.126, 0.002, 0.001, 0.001, 0.001]
    )


@pytest.mark.parametrize(
    ("num_sampled", "streams", "reason"),
    [
        ((2, 1), [[10.0, 10.1], [10.0, 10.1]], "step 8 made 1 tokens, 2 streams ran"),
        ((2, 2), [[10.0, 10.1]], "the steps are of 2 streams, 1 arrived"),
        ((1, 1), [[10.0, 10.02]], r"arrived 0\.005000 s before its step"),
    ],
)
def test_what_does_not_fit_is_said(num_sampled: tuple[int, ...], streams: list[list[float]], reason: str) -> None:
    with pytest.raises(TrialError, match=reason):
        delays(steps(*num_sampled), streams)


def test_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    log.write_text('{"step": 3, "monotonic_ns": 1500000000, "num_sampled": 2}\n')
    assert read_steps(log) == [Step(3, 1.5, 2)]
