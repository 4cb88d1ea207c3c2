import math
import random

import pytest

from loadtest.client import Failure, FailureKind, Outcome, TokenSource
from loadtest.load import Request
from loadtest.stats import Distribution, Goodput, Slo, bucket_end_s, distribution, histogram, percentile, summarize
from loadtest.workload import Prompt


def request(
    sent_at: float,
    *,
    ttft_s: float = 0.1,
    itl_s: tuple[float, ...] = (0.02, 0.04),
    num_tokens: int = 4,
    failure: Failure | None = None,
    prefix: str = "",
    cached_tokens: int | None = None,
) -> Request:
    first, last = sent_at + ttft_s, sent_at + ttft_s + sum(itl_s)
    outcome = Outcome(
        sent_at=sent_at,
        ended_at=last + 0.01,
        first_text_at=first,
        last_text_at=last,
        itl_s=itl_s,
        num_events=len(itl_s) + 1,
        num_tokens=num_tokens,
        tokens_from=TokenSource.USAGE,
        prompt_tokens=None if cached_tokens is None else 32,
        cached_tokens=cached_tokens,
        finish_reason="length",
        failure=failure,
    )
    return Request(Prompt(prefix, 0, "text", num_tokens), sent_at - 0.001, outcome)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentile_is_interpolated(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


def test_percentile_of_one_value() -> None:
    assert percentile([7.0], 99) == 7.0


def test_distribution() -> None:
    assert distribution([]) is None
    assert distribution([5.0, 1.0, 3.0]) == Distribution(count=3, mean=3.0, p50=3.0, p90=4.6, p99=4.96, max=5.0)


def test_histogram_is_right_to_its_base() -> None:
    rng = random.Random(5)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    buckets = histogram(values)
    assert sum(buckets.values()) == 5000
    below, half = 0, None
    for bucket, count in buckets.items():
        below += count
        if half is None and below >= 2500:
            half = bucket_end_s(bucket)
    assert half is not None
    assert 1.0 <= half / percentile(sorted(values), 50) <= 1.0201


@pytest.mark.parametrize("value_s", [0.0, 1e-9, 1e-6])
def test_histogram_has_a_floor_of_a_microsecond(value_s: float) -> None:
    assert histogram([value_s]) == {"0": 1}


def test_failures_are_counted_apart() -> None:
    refused = Failure(FailureKind.HTTP, "no credit", 429)
    requests = [
        request(10.0),
        request(10.5, failure=refused),
        request(11.0, ttft_s=0.3, num_tokens=3),
        request(11.1, failure=Failure(FailureKind.HTTP, "again", 429)),
        request(11.2, failure=Failure(FailureKind.DISCONNECT, "closed")),
    ]
    summary = summarize(requests)
    assert (summary.num_requests, summary.num_ok) == (5, 2)
    assert summary.failures == {"http_429": 2, "disconnect": 1}
    assert summary.first_failures == {"http_429": "no credit", "disconnect": "closed"}
    assert summary.wall_s == pytest.approx(1.37)  # until the end of the third
    assert summary.output_tokens == 7
    assert summary.output_tokens_per_s == pytest.approx(7 / 1.37)
    assert summary.requests_per_s == pytest.approx(2 / 1.37)
    assert summary.tokens_from == {"usage": 2}
    assert summary.ttft_s is not None
    assert [summary.ttft_s.count, summary.ttft_s.p50] == pytest.approx([2, 0.2])
    assert summary.itl_s is not None
    assert [summary.itl_s.count, summary.itl_s.mean] == pytest.approx([4, 0.03])
    assert summary.tpot_s is not None
    assert summary.tpot_s.max == pytest.approx(0.06 / 2)
    assert summary.send_lag_s is not None
    assert [summary.send_lag_s.count, summary.send_lag_s.max] == pytest.approx([5, 0.001])


def test_only_failures() -> None:
    summary = summarize([request(1.0, failure=Failure(FailureKind.TIMEOUT, "late"))])
    assert (summary.num_ok, summary.output_tokens_per_s, summary.ttft_s, summary.tpot_s) == (0, 0.0, None, None)


def test_usage_is_summed_where_it_is_known() -> None:
    summary = summarize([request(1.0, cached_tokens=16), request(2.0, cached_tokens=0), request(3.0)])
    assert (summary.prompt_tokens, summary.cached_tokens) == (64, 16)
    assert summarize([request(1.0)]).cached_tokens is None


def test_later_ttft_is_of_requests_sent_when_the_prefix_had_been_served() -> None:
    requests = [
        request(1.0, ttft_s=0.8, prefix="p"),
        request(1.5, ttft_s=0.7, prefix="p"),  # before the first text of the first: it cannot have hit
        request(1.9, ttft_s=0.05, prefix="p"),
        request(2.0, ttft_s=0.07, prefix="p"),
    ]
    later = summarize(requests).ttft_later_s
    assert later is not None
    assert [later.count, later.p50] == pytest.approx([2, 0.06])
    assert summarize([request(1.0), request(3.0)]).ttft_later_s is None


def test_tpot_needs_two_tokens() -> None:
    outcome = request(1.0, itl_s=(), num_tokens=1).outcome
    assert outcome.tpot_s is None
    assert math.isclose(outcome.e2e_s, 0.11)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(ttft_s=0.101, itl_s=0.04), True),
        (Slo(ttft_s=0.09), False),
        (Slo(itl_s=0.03), False),
        (Slo(itl_s=0.0399), True),  # the 99th percentile of 0.02 and 0.04 is 0.0398
    ],
)
def test_an_slo_is_kept_by_both_times(slo: Slo, kept: bool) -> None:
    assert slo.is_kept_by(request(1.0).outcome) is kept


def test_a_single_event_has_no_gap_and_a_failed_request_keeps_nothing() -> None:
    assert Slo(itl_s=0.001).is_kept_by(request(1.0, itl_s=(), num_tokens=1).outcome)
    assert not Slo(ttft_s=9.0).is_kept_by(request(1.0, failure=Failure(FailureKind.TIMEOUT, "late")).outcome)


def test_goodput_is_of_all_requests_sent() -> None:
    slo = Slo(ttft_s=0.2)
    refused = Failure(FailureKind.HTTP, "no credit", 429)
    requests = [request(10.0), request(10.5, failure=refused), request(11.0, ttft_s=0.3), request(11.2, num_tokens=6)]
    summary = summarize(requests, slo)
    assert summary.wall_s == pytest.approx(1.37)
    assert summary.goodput is not None
    expected = Goodput(slo, 2, 0.5, pytest.approx(2 / 1.37), pytest.approx(10 / 1.37))  # type: ignore[arg-type]
    assert summary.goodput == expected
    assert summarize(requests).goodput is None
