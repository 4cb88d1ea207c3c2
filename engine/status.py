"""What the step loop shows of itself to Beats, metrics and the hang rule."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.messages import Totals

#: The longest step is looked for this far back, in slices of this length.
WINDOW_S, SLICE_S = 300.0, 10.0


@dataclass(frozen=True, slots=True)
class Status:
    """About a moment of the step loop, which goes on while another thread looks.

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
    """The longest step of the last five minutes, in constant memory. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, float]] = deque()  # (start, longest) of each slice

    def add(self, now: float, duration: float) -> None:
        slices = self._slices
        if not slices or now >= slices[-1][0] + SLICE_S:
            slices.append((now, duration))
            while slices[0][0] < now - WINDOW_S:
                slices.popleft()
        elif duration > slices[-1][1]:
            slices[-1] = (slices[-1][0], duration)

    def value(self, now: float) -> float:
        # A copy, made at once: a deque must not change while Python code goes through it.
        return max((longest for start, longest in tuple(self._slices) if start >= now - WINDOW_S), default=0.0)
