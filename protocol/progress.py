"""How far a start or a download is, for a person at a terminal."""

from __future__ import annotations

import sys

from tqdm import tqdm

from protocol.process import Progress as Step


class ProgressBar:
    """One bar, redrawn, with bytes and speed; nothing where stderr is no terminal, or `wanted` is False."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.draws = wanted and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._phase = ""
        self._closed = False

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._closed:  # later starts are told by the log
            return
        if self._bar is None or phase != self._phase:
            self._clear()
            self._phase = phase
            self._bar = tqdm(
                desc=phase,
                total=total or None,
                initial=done,  # what was there before says nothing of the speed
                unit="B",
                unit_scale=True,
                leave=False,
                bar_format=None if total else "{desc} ...",
                disable=not self.draws,
            )
        self._bar.n = done
        self._bar.refresh()

    def show(self, _program: str, step: Step) -> None:
        """What a supervisor tells of its children."""
        self(step.phase, step.done, step.total)

    def close(self) -> None:
        self._closed = True
        self._clear()

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
