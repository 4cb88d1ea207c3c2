"""What the step loop shows of itself to Beats, metrics and the hang rule."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.messages import Totals

#: The longest step is looked for this far back, in slices of this length.
WINDOW_S, SLICE_S = 300.0, 10.0


@dataclass(frozen=True, slots=True)
class Status:
    """A moment of the step loop, replaced as a whole after every step.

    `busy_since` (monotonic seconds) is when the oldest step in flight became the device's; None
    while there is nothing to do.
    """

    step: int = 0
    busy_since: float | None = None
    longest_step_s: float = 0.0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    totals: Totals = field(default_factory=Totals)


@dataclass(slots=True)
class Counts:
    """Running sums behind `Totals`. Prefix queries and hits are in tokens."""

    generated: int = 0
    prompt: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0

    def totals(self) -> Totals:
        return Totals(
            self.generated,
            self.prompt,
            self.prefix_queries,
            self.prefix_hits,
            self.preemptions,
            self.aborted,
            self.finished,
        )


class LongestStep:
    """The longest step of the last five minutes, in constant memory."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, float]] = deque()  # (start, longest) of each slice

    def add(self, now: float, duration: float) -> None:
        if not self._slices or now >= self._slices[-1][0] + SLICE_S:
            self._slices.append((now, duration))
        elif duration > self._slices[-1][1]:
            self._slices[-1] = (self._slices[-1][0], duration)

    def value(self, now: float) -> float:
        while self._slices and self._slices[0][0] < now - WINDOW_S:
            self._slices.popleft()
        return max((longest for _, longest in self._slices), default=0.0)
