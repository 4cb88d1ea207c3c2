"""A histogram of the times between events, for what happens at every token.

`prometheus_client.Histogram` takes its observations one by one: 1.2 µs, and thrice that where several workers share
files. This is a collector over the library's own values (`prometheus_client.values`), so it adds up over workers as
all others do.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, values
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class _Value(Protocol):
    """A number that the library keeps, in memory or in a worker's file."""

    def inc(self, amount: float) -> None: ...

    def get(self) -> float: ...


_written: Callable[[float], str] = floatToGoString


class Stopwatch:
    """For the times between the events of one thing."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at: float | None = None  # the last of them, by `time.perf_counter`


class Tally:
    """The observations of one label set; `lap` takes 0.4 µs. What was observed shows after `FLUSH_S` or `flush`."""

    FLUSH_S = 1.0

    def __init__(self, histogram: TalliedHistogram, label_values: tuple[str, ...]) -> None:
        name, labels = histogram.name, histogram.label_names

        def value(suffix: str, names: tuple[str, ...], of: tuple[str, ...]) -> _Value:
            kept: _Value = values.ValueClass("histogram", name, name + suffix, names, of, histogram.help)
            return kept

        self._bounds = histogram.bounds
        self._shown_sum = value("_sum", labels, label_values)
        self._shown_counts = [
            value("_bucket", (*labels, "le"), (*label_values, _written(bound))) for bound in self._bounds
        ]
        self._sum = 0.0
        self._counts = [0] * len(self._bounds)
        self._flush_at = 0.0

    def lap(self, stopwatch: Stopwatch) -> None:
        """Observe the seconds since the last lap of `stopwatch`, unless this is its first."""
        now, since = time.perf_counter(), stopwatch.at
        stopwatch.at = now
        if since is None:
            return
        amount = now - since
        self._sum += amount
        self._counts[bisect_left(self._bounds, amount)] += 1
        if now >= self._flush_at:
            self._flush_at = now + self.FLUSH_S
            self.flush()

    def flush(self) -> None:
        self._shown_sum.inc(self._sum)
        self._sum = 0.0
        for bucket, count in enumerate(self._counts):
            if count:
                self._shown_counts[bucket].inc(count)
                self._counts[bucket] = 0

    def shown(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, observations up to it) of each bucket, and the sum of all observations."""
        total, buckets = 0.0, []
        for bound, count in zip(self._bounds, self._shown_counts, strict=True):
            total += count.get()
            buckets.append((_written(bound), total))
        return buckets, self._shown_sum.get()


class TalliedHistogram(Collector):
    """A histogram of tallies by label values. `bounds` are its buckets' upper ones; the infinite one is added."""

    def __init__(
        self, name: str, text: str, label_names: tuple[str, ...], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self.name = name
        self.help = text
        self.label_names = label_names
        self.bounds = (*bounds, math.inf)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *label_values: str) -> Tally:
        """The tally of these values, in the order of the names; the same one each time."""
        tally = self._tallies.get(label_values)
        if tally is None:
            tally = self._tallies[label_values] = Tally(self, label_values)
        return tally

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self.name, self.help, labels=self.label_names)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        for label_values, tally in list(self._tallies.items()):
            family.add_metric(label_values, *tally.shown())
        yield family
