"""From the I/O thread to the step loop: what arrived, and a way to sleep until something does."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from protocol.messages import Submit


@dataclass(frozen=True, slots=True)
class Submitted:
    """A Submit that `engine.admission` let pass, from the gateway with account number `owner`."""

    owner: int
    submit: Submit


@dataclass(frozen=True, slots=True)
class Aborted:
    owner: int
    handle: int


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The gateway is gone; nothing can be told to it any more."""

    owner: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what there is; what is left at `deadline` (monotonic seconds) ends with an error."""

    deadline: float


Arrival = Submitted | Aborted | OwnerLost | Drain


class Inbox:
    """One writer, one reader. Order is kept. The queue is one in C: a sleeper wakes by one lock, and no Python runs."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._first: list[Arrival] = []  # what a sleep ended with

    def put(self, arrival: Arrival) -> None:
        self._arrivals.put(arrival)

    def take(self) -> list[Arrival]:
        """Everything that has arrived."""
        taken, self._first = self._first, []
        while not self._arrivals.empty():
            taken.append(self._arrivals.get())
        return taken

    def wait(self, timeout: float | None = None) -> None:
        """Sleep until something has arrived, at most `timeout` seconds."""
        if not self._first:
            with contextlib.suppress(Empty):
                self._first.append(self._arrivals.get(timeout=timeout))
