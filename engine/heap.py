"""Memory of connections that are gone: libzmq frees it, the C library keeps it, this gives it back.

A connection that its peer left costs libzmq 50 to 120 KiB until the last of its frames was read. Of a thousand that
came and went while the engine was short of processor time, 80 MiB of heap stayed, 45 MiB of it resident, and 7 MiB in
use: as before them. glibc by itself returns only the end of a heap, where some live allocation always lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

#: Rejected frames that are worth a look through the heap: of as many connections, some 3 MiB.
LEAST_REJECTED = 64


class Heap:
    """Returns the holes of the heap to the system when a burst of rejected frames is over.

    `trim` is by default glibc's malloc_trim: 5 to 25 ms for the holes of a thousand connections.
    """

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._trim = trim or _malloc_trim
        self._num_seen = 0
        self._num_settled = 0

    def tick(self, num_rejected: int) -> None:
        """Every 250 ms, with the number of frames rejected up to now."""
        is_quiet = num_rejected == self._num_seen
        self._num_seen = num_rejected
        if is_quiet and num_rejected - self._num_settled >= LEAST_REJECTED:
            self._num_settled = num_rejected
            self._trim()


def _malloc_trim() -> None:
    """Give back what malloc keeps; nothing where the C library has no such function (musl)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
