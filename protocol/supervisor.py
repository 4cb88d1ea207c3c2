"""Keeps a set of programs running as child processes: starts, restarts, stops them.

A life that was ready is followed by the next one at once. Lives that end before they are ready
are spaced 1, 2, 4 ... 30 s apart, and the fifth in a row is the last: the supervisor then stops
the others and raises `ChildFailed`. Programs start together and stop group by group, the group
listed last first.

Children are in the supervisor's session, each in a process group of its own, so that Ctrl-C on
the terminal reaches the supervisor alone. A child outlives it only to drain: see
`protocol.process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.process import EXIT_UNUSABLE, GaveUp, Progress, Ready, parse_report

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
#: A child that is there for so long after its grace is over is stuck.
STOP_MARGIN_S = 5.0


class ChildFailed(Exception):
    """A program cannot be kept running. The text has its name and its last error."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `--parent-pipe=N` is added to `argv`. After SIGTERM it gives open work `grace_s` seconds."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    grace_s: float = 0.0


#: Called with the name of a program and how far it is with its start.
OnProgress = Callable[[str, Progress], None]


class Child:
    """One program and its lives, one after the other."""

    def __init__(self, program: Program, on_progress: OnProgress) -> None:
        self.name = program.name
        self.ready = asyncio.Event()
        self._program = program
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def keep_running(self) -> None:
        """Start the program again and again until `stop`. Raises ChildFailed when that is no use."""
        failed_starts = 0
        while not self._stopping.is_set():
            reason = await self._live()
            if self._stopping.is_set():
                return
            if self.ready.is_set():
                failed_starts, pause_s = 0, 0.0
            else:
                failed_starts += 1
                pause_s = min(FIRST_PAUSE_S * 2 ** (failed_starts - 1), LONGEST_PAUSE_S)
                assert self._process is not None
                if failed_starts == MAX_FAILED_STARTS or self._process.returncode == EXIT_UNUSABLE:
                    raise ChildFailed(f"the {self.name} does not start: {reason}")
            self.ready.clear()
            log.warning("%s_ended", self.name, extra={"reason": reason, "restart_in_s": pause_s})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def stop(self) -> None:
        """End the current life by SIGTERM, or by SIGKILL when it outstays its grace."""
        self._stopping.set()
        if not self._signal(signal.SIGTERM):
            return
        assert self._process is not None
        limit_s = self._program.grace_s + STOP_MARGIN_S
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            log.warning("%s_killed", self.name, extra={"after_s": limit_s})
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the current life at once, and let there be no other."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None or self._process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    async def _live(self) -> str:
        """One life, from start to end; returns what ended it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._program.argv,
                f"--parent-pipe={theirs.fileno()}",
                stdin=subprocess.DEVNULL,
                env=dict(self._program.environ),
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        if self._stopping.is_set():  # while it started
            self._signal(signal.SIGTERM)
        reader, writer = await asyncio.open_connection(sock=ours)
        reason = ""
        try:
            while line := await reader.readline():
                match parse_report(line):
                    case Progress() as progress:
                        self._on_progress(self.name, progress)
                    case Ready():
                        self.ready.set()
                    case GaveUp(text):
                        reason = text
            status = await self._process.wait()
        finally:
            writer.close()
        return reason or _exit_text(status)


class Supervisor:
    """The children of one machine, in groups: `groups[-1]` is stopped first."""

    def __init__(self, groups: Sequence[Sequence[Program]], on_progress: OnProgress) -> None:
        self._groups = [[Child(program, on_progress) for program in group] for group in groups]
        self._children = [child for group in self._groups for child in group]
        self._stop_asked = asyncio.Event()
        self._killed = False

    async def run(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Keep everything running until `stop`; `on_ready` is called once, when all children are ready.

        Raises ChildFailed when one of them cannot be kept running.
        """
        lives = [asyncio.create_task(child.keep_running(), name=child.name) for child in self._children]
        ready = asyncio.create_task(self._announce(on_ready), name="announce")
        stop = asyncio.create_task(self._stop_asked.wait(), name="stop")
        try:
            waiting = {*lives, ready, stop}
            while stop in waiting:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()  # raises what it raised
        finally:
            for task in (ready, stop):
                task.cancel()
            await self._stop_children()
            await asyncio.gather(*lives, ready, stop, return_exceptions=True)

    def stop(self) -> None:
        """Stop all children, group by group; at a second call at once."""
        if self._stop_asked.is_set():
            self._killed = True
            for child in self._children:
                child.kill()
        self._stop_asked.set()

    @property
    def killed(self) -> bool:
        """Whether `stop` was called twice."""
        return self._killed

    async def _announce(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(child.ready.wait() for child in self._children))
        await on_ready()

    async def _stop_children(self) -> None:
        for group in reversed(self._groups):
            await asyncio.gather(*(child.stop() for child in group))


def _exit_text(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
