"""From a step log and the arrival times of tokens to the time each token took from the engine to the client.

The fake engine writes down when each of its steps ended. A stream that decodes without a pause gets token k from step
s + k; s is unknown, but no token comes before its step, so the latest s for which that holds is taken. It is the right
one unless every single token of the stream was late by a whole step; then times would come out too short by that, so
the tokens found for each step are compared with the number that the step says it made.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtest.servers import TrialError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: when it ended (seconds of the monotonic clock) and the tokens it made."""

    number: int
    at: float
    num_sampled: int


def read_steps(log: Path) -> list[Step]:
    """The steps in a log of `--fake-step-log`, in order."""
    rows = map(orjson.loads, log.read_bytes().splitlines())
    return [Step(row["step"], row["monotonic_ns"] / 1e9, row["num_sampled"]) for row in rows]


def delays(steps: Sequence[Step], streams: Iterable[Sequence[float]]) -> list[float]:
    """Seconds from the engine to the client for each token of each stream; a stream is its tokens' arrival times.

    `steps` are those of the run alone. Raises TrialError when a step made more or fewer tokens than arrived of it.
    """
    ends = [step.at for step in steps]
    found, arrived = [], Counter[int]()
    for times in streams:
        first = _first_step(ends, times)
        found += [at - ends[first + number] for number, at in enumerate(times)]
        arrived.update(range(first, first + len(times)))
    for index, step in enumerate(steps):
        if arrived[index] != step.num_sampled:
            raise TrialError(f"step {step.number} made {step.num_sampled} tokens, {arrived[index]} arrivals fit it")
    return found


def _first_step(ends: Sequence[float], times: Sequence[float]) -> int:
    """Index of the latest step that can have made the first token."""
    latest = min(bisect_right(ends, at) - 1 - number for number, at in enumerate(times))
    if latest < 0:
        raise TrialError("a token arrived before any step could have made it")
    return latest
