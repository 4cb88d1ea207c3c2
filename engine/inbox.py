"""From the I/O thread to the step loop: what arrived, and a way to sleep until something does."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

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
    """One writer, one reader. Order is kept."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._filled = threading.Event()

    def put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._filled.set()

    def take(self) -> list[Arrival]:
        """Everything that has arrived."""
        # Cleared first: what is put between the two lines is taken now, and wakes in vain later.
        self._filled.clear()
        taken = []
        while self._arrivals:
            taken.append(self._arrivals.popleft())
        return taken

    def wait(self, timeout: float | None = None) -> None:
        """Sleep until something has arrived, at most `timeout` seconds."""
        self._filled.wait(timeout)
