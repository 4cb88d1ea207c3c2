"""From a step log and the arrival times of tokens to the time each token took from the engine to the client.

The engine writes down when it sends each of its steps and how many tokens it has. A stream gets a token from each
step from its first on, so where all streams have as many tokens, those numbers tell how many streams began with each
step; and a stream that began a step later has its quickest token that much later, whatever the others met on their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from loadtest.servers import TrialError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: when its send began (seconds of the monotonic clock) and the tokens it made."""

    number: int
    at: float
    num_sampled: int


def read_steps(log: Path) -> list[Step]:
    """The steps in a log of `--step-log`, in order."""
    rows = map(orjson.loads, log.read_bytes().splitlines())
    return [Step(row["step"], row["monotonic_ns"] / 1e9, row["num_sampled"]) for row in rows]


def delays(steps: Sequence[Step], streams: Sequence[Sequence[float]]) -> list[float]:
    """Seconds from the engine to the client for each token of each stream, given its tokens' arrival times.

    `steps` are those of the run alone, and all streams have as many tokens. Raises TrialError when steps and streams do
    not fit together: one was preempted, or paused, or is not of this run.
    """
    (num_tokens,) = {len(times) for times in streams}
    firsts = _first_steps(steps, num_tokens)
    if len(firsts) != len(streams):
        raise TrialError(f"the steps are of {len(firsts)} streams, {len(streams)} arrived")

    def quickest(times: Sequence[float]) -> float:
        return min(at - step.at for at, step in zip(times, steps, strict=False))

    found: list[float] = []
    for first, times in zip(firsts, sorted(streams, key=quickest), strict=True):
        found += [at - step.at for at, step in zip(times, steps[first : first + num_tokens], strict=True)]
    if min(found) < 0:
        raise TrialError(f"a token arrived {-min(found):.6f} s before its step was sent")
    return found


def _first_steps(steps: Sequence[Step], num_tokens: int) -> list[int]:
    """Index of the first step of each stream, in order."""
    firsts: list[int] = []
    begun: list[int] = []  # streams that began with each step
    running = 0
    for index, step in enumerate(steps):
        if index >= num_tokens:
            running -= begun[index - num_tokens]
        if step.num_sampled < running:
            raise TrialError(f"step {step.number} made {step.num_sampled} tokens, {running} streams ran")
        begun.append(step.num_sampled - running)
        running = step.num_sampled
        firsts += [index] * begun[-1]
    return firsts
