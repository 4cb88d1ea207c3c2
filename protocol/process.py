"""What a child process and the supervisor that started it tell each other.

They are joined by a socket pair whose number the child gets as `--parent-pipe`. The child writes
one JSON object a line: progress while it loads, `ready` once it serves, the reason when it gives
up. The parent writes nothing; when it dies the kernel closes its end, and the child drains and
exits as if told to by SIGTERM.

    parent = Parent.attach(config.parent_pipe)
    parent.progress("weights", 10, 272)
    parent.ready()
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from types import TracebackType

#: Exit status of a program that could not start this time; the next may succeed.
EXIT_FAILED = 1

#: Exit status of a program that no new start can help: a wrong setting, a model it cannot serve.
EXIT_UNUSABLE = 2

_MAX_REASON = 2000


@dataclass(frozen=True, slots=True)
class Progress:
    """Part of the way to ready: `done` of `total` units of a phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The child serves."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The child is about to exit because of `reason`, a text for people."""

    reason: str


Report = Progress | Ready | GaveUp


class Parent:
    """A child's view of its supervisor; of nobody, when the program was started by hand."""

    def __init__(self, pipe: socket.socket | None) -> None:
        self._pipe = pipe

    @classmethod
    def attach(cls, descriptor: int | None) -> Parent:
        """Join the supervisor, to be called from the main thread as early as possible.

        From here on SIGINT is the supervisor's affair, its death ends this process by SIGTERM, and
        an exception that nobody catches is reported to it.
        """
        if descriptor is None:
            return cls(None)
        os.set_inheritable(descriptor, False)
        parent = cls(socket.socket(fileno=descriptor))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=parent._await_end, name="parent-pipe", daemon=True).start()
        sys.excepthook = parent._report_uncaught
        return parent

    def progress(self, phase: str, done: int, total: int) -> None:
        self._tell({"phase": phase, "done": done, "total": total})

    def ready(self) -> None:
        self._tell({"ready": True})

    def give_up(self, reason: str) -> None:
        """Say why this process is about to exit with an error."""
        self._tell({"reason": reason[:_MAX_REASON]})

    def _tell(self, report: dict[str, object]) -> None:
        if self._pipe is None:
            return
        try:
            self._pipe.sendall(json.dumps(report).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._pipe = None  # the parent is gone: SIGTERM is under way

    def _await_end(self) -> None:
        assert self._pipe is not None
        try:
            while self._pipe.recv(64):
                pass
        except ConnectionResetError:
            pass  # an end like the other
        os.kill(os.getpid(), signal.SIGTERM)

    def _report_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.give_up(f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)


def parse_report(line: bytes) -> Report:
    """What a child said in one line."""
    report = json.loads(line)
    if "phase" in report:
        return Progress(report["phase"], report["done"], report["total"])
    if "reason" in report:
        return GaveUp(report["reason"])
    return Ready()
