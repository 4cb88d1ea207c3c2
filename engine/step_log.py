"""A log of steps as they are sent: one half of a measurement of what lies between an engine and its clients."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import orjson

from engine.events import Delivery
from protocol.messages import Step


class StepLog:
    """A line of JSON for each step and gateway: its number, the time (`time.monotonic_ns`), and its tokens."""

    def __init__(self, path: Path) -> None:
        """Appends to `path`. Raises OSError."""
        self._file = path.open("ab", buffering=0)

    def sending(self, deliveries: Iterable[Delivery]) -> None:
        """These are encoded and sent next. Who has a token finds its line."""
        now = time.monotonic_ns()
        for _, message in deliveries:
            if isinstance(message, Step):
                line = {"step": message.step, "monotonic_ns": now, "num_sampled": len(message.ids)}
                self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()
