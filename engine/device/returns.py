"""The way back: what a step sampled, in pinned memory behind an event.

A prompt's first token waits for this, and what torch touches is cold by then: memory, views and events are made once.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import torch
from torch import Tensor

from protocol.messages import U32

#: Ids from here on are negative ones of int32.
_NEGATIVE = 2**31


class Returns:
    """For one step in flight at a time, of at most `max_sampled` rows."""

    def __init__(self, max_sampled: int, device: torch.device) -> None:
        self._pinned = torch.zeros(max_sampled, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._bytes = memoryview(self._pinned.numpy()).cast("B")
        self._first = lru_cache(64)(self._slice)  # of graphs' sizes, above all
        self._done = torch.cuda.Event()
        self._stream = torch.cuda.current_stream(device)

    def send(self, ids: Tensor) -> None:
        """Begin the copy of int32 `ids`, and mark the end of all that was begun before."""
        if count := len(ids):
            self._first(count).copy_(ids, non_blocking=True)
        self._done.record(self._stream)

    def wait(self, count: int) -> tuple[array[int], list[int]]:
        """Once the copy is done: the first `count` ids, as 32 bits, and the rows where they are negative."""
        self._done.synchronize()
        ids = array(U32)
        ids.frombytes(self._bytes[: 4 * count])
        if max(ids, default=0) < _NEGATIVE:
            return ids, []
        return ids, [row for row, token in enumerate(ids) if token >= _NEGATIVE]

    def _slice(self, count: int) -> Tensor:
        return self._pinned[:count]
