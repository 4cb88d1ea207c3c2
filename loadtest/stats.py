"""Outcomes to numbers: percentiles, rates, and failures by kind."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.client import Outcome
from loadtest.load import Request

# Buckets of the histogram of gaps: bucket i holds values in [1.02^i, 1.02^(i+1)) µs. Two per cent is finer than any
# repeat, and a run of a million tokens fits in some 500 numbers.
HISTOGRAM_BASE = 1.02


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` values; percentiles are interpolated linearly between order statistics."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user is promised; None leaves a time open.

    A request keeps it if its TTFT and the 99th percentile of its own gaps between text events are within.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def is_kept_by(self, outcome: Outcome) -> bool:
        """A failed request keeps nothing."""
        if outcome.failure is not None or outcome.ttft_s is None:
            return False
        if self.ttft_s is not None and outcome.ttft_s > self.ttft_s:
            return False
        return self.itl_s is None or not outcome.itl_s or percentile(sorted(outcome.itl_s), 99) <= self.itl_s


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that kept an Slo: `share` is of all that were sent."""

    slo: Slo
    num_good: int
    share: float
    requests_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates and times are over the successful requests; `failures` counts the others by kind.

    `ttft_later_s` is the part of `ttft_s` that a prefix cache can serve: requests sent after the first text of an
    earlier one with the same shared prefix. `send_lag_s` is how late the client itself sent.
    """

    num_requests: int
    num_ok: int
    failures: Mapping[str, int]
    first_failures: Mapping[str, str]  # kind -> what was said
    wall_s: float
    requests_per_s: float
    prompt_tokens: int | None  # None if the server reports no usage
    cached_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float
    output_events: int
    tokens_from: Mapping[str, int]
    ttft_s: Distribution | None
    ttft_later_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    send_lag_s: Distribution | None
    goodput: Goodput | None  # None without an Slo


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of at least one value in rising order."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float]) -> Distribution | None:
    """None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def histogram(values_s: Iterable[float]) -> dict[str, int]:
    """Bucket number (a string, as JSON has it) -> count, in rising order. Values below 1 µs count as 1 µs."""
    step = math.log(HISTOGRAM_BASE)
    counts = Counter(int(math.log(max(1.0, value * 1e6)) / step) for value in values_s)
    return {str(bucket): counts[bucket] for bucket in sorted(counts)}


def bucket_end_s(bucket: str) -> float:
    """Upper end of a bucket of `histogram`, in seconds."""
    return float(HISTOGRAM_BASE ** (int(bucket) + 1) * 1e-6)


def summarize(requests: Sequence[Request], slo: Slo | None = None) -> Summary:
    """The numbers of at least one request."""
    failed = [failure for request in requests if (failure := request.outcome.failure) is not None]
    ok = [request.outcome for request in requests if request.outcome.failure is None]
    wall_s = max(r.outcome.ended_at for r in requests) - min(r.outcome.sent_at for r in requests)
    output_tokens = sum(outcome.num_tokens for outcome in ok)
    return Summary(
        num_requests=len(requests),
        num_ok=len(ok),
        failures=dict(Counter(failure.key for failure in failed)),
        first_failures={failure.key: failure.detail for failure in reversed(failed)},
        wall_s=wall_s,
        requests_per_s=len(ok) / wall_s,
        prompt_tokens=_known_sum(outcome.prompt_tokens for outcome in ok),
        cached_tokens=_known_sum(outcome.cached_tokens for outcome in ok),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        output_events=sum(outcome.num_events for outcome in ok),
        tokens_from=dict(Counter(str(outcome.tokens_from) for outcome in ok)),
        ttft_s=distribution(ttft for outcome in ok if (ttft := outcome.ttft_s) is not None),
        ttft_later_s=distribution(_later_ttfts(requests)),
        itl_s=distribution(gap for outcome in ok for gap in outcome.itl_s),
        tpot_s=distribution(tpot for outcome in ok if (tpot := outcome.tpot_s) is not None),
        e2e_s=distribution(outcome.e2e_s for outcome in ok),
        send_lag_s=distribution(request.outcome.sent_at - request.due_at for request in requests),
        goodput=None if slo is None else _goodput(requests, slo, wall_s),
    )


def _goodput(requests: Sequence[Request], slo: Slo, wall_s: float) -> Goodput:
    good = [request.outcome for request in requests if slo.is_kept_by(request.outcome)]
    return Goodput(
        slo=slo,
        num_good=len(good),
        share=len(good) / len(requests),
        requests_per_s=len(good) / wall_s,
        output_tokens_per_s=sum(outcome.num_tokens for outcome in good) / wall_s,
    )


def _known_sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _later_ttfts(requests: Sequence[Request]) -> list[float]:
    """TTFT of the successful requests sent when their shared prefix had been served once."""
    served_at: dict[int, float] = {}
    for request in requests:
        if request.prompt.prefix and (at := request.outcome.first_text_at) is not None:
            index = request.prompt.prefix_index
            served_at[index] = min(at, served_at.get(index, at))
    return [
        ttft
        for request in requests
        if request.prompt.prefix
        and request.outcome.failure is None
        and (ttft := request.outcome.ttft_s) is not None
        and request.outcome.sent_at >= served_at[request.prompt.prefix_index]
    ]
