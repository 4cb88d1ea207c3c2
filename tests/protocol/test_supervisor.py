"""The supervisor: restarts, back-off, the order of stopping, and what children hear of its death."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import supervisor as supervisor_module
from protocol.process import EXIT_UNUSABLE, GaveUp, Progress, Ready, parse_report
from protocol.supervisor import ChildFailed, Program, Supervisor

ROOT = Path(__file__).parents[2]

#: A child that appends to a journal what happens to it. `{body}` runs once it is attached.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from protocol.process import Parent

name, journal, pipe = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3].partition("=")[2])
parent = Parent.attach(pipe)

def note(event):
    with journal.open("a") as file:
        file.write(f"{{name}} {{event}} {{os.getpid()}}\\n")

def end(*_):
    note("terminated")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
note("started")
{body}
"""

SERVE = "parent.ready()\nnote('ready')\nwhile True: time.sleep(1)"


class Journal:
    """What children noted, in order: (name, event, pid)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[tuple[str, str, int]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(name, event, int(pid)) for name, event, pid in (line.split() for line in lines)]

    def events(self) -> list[str]:
        return [f"{name} {event}" for name, event, _ in self.entries()]

    async def wait(self, *events: str) -> None:
        while any(self.events().count(event) < events.count(event) for event in events):
            await asyncio.sleep(0.01)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def program(journal: Journal) -> Callable[[str, str], Program]:
    def make(name: str, body: str) -> Program:
        argv = (sys.executable, "-c", CHILD.format(body=body), name, str(journal.path))
        return Program(name, argv, os.environ | {"PYTHONPATH": str(ROOT)})

    return make


class Watch:
    """What the supervisor told: progress, and how often it announced itself."""

    def __init__(self) -> None:
        self.progress: list[tuple[str, Progress]] = []
        self.announced = asyncio.Event()

    def on_progress(self, name: str, step: Progress) -> None:
        self.progress.append((name, step))

    async def announce(self) -> None:
        assert not self.announced.is_set()
        self.announced.set()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.01)


async def test_children_start_together_are_announced_once_and_stop_last_group_first(program, journal) -> None:
    watch = Watch()
    supervisor = Supervisor([[program("engine", SERVE)], [program("gateway", SERVE)]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await watch.announced.wait()
    await journal.wait("engine ready", "gateway ready")
    supervisor.stop()
    await running
    assert journal.events()[4:] == ["gateway terminated", "engine terminated"]
    assert not supervisor.killed


async def test_a_child_that_was_ready_restarts_at_once(program, journal, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 100.0)
    watch = Watch()
    supervisor = Supervisor([[program("engine", SERVE)]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    for life in range(1, 8):  # more often than failed starts are allowed
        await journal.wait(*["engine ready"] * life)
        os.kill(journal.entries()[-1][2], signal.SIGKILL)
    await journal.wait(*["engine ready"] * 8)
    supervisor.stop()
    await running


async def test_the_fifth_failed_start_in_a_row_is_the_last(program, journal) -> None:
    watch = Watch()
    failing = program("engine", "parent.give_up(f'no weights in {name}'); sys.exit(1)")
    supervisor = Supervisor([[failing], [program("gateway", SERVE)]], watch.on_progress)
    with pytest.raises(ChildFailed, match=r"^the engine does not start: no weights in engine$"):
        await supervisor.run(watch.announce)
    assert journal.events().count("engine started") == 5
    assert journal.events()[-1] == "gateway terminated"
    assert not watch.announced.is_set()


async def test_failed_starts_are_spaced_one_two_four_seconds(program, journal, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(supervisor_module, "LONGEST_PAUSE_S", 0.4)
    failing = program("engine", "Path(f'{journal}.{time.monotonic_ns()}').touch(); os.abort()")
    with pytest.raises(ChildFailed, match="ended by SIGABRT"):
        await Supervisor([[failing]], lambda *_: None).run(Watch().announce)
    starts = sorted(int(path.suffix[1:]) / 1e9 for path in journal.path.parent.glob("journal.*"))
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert [gap >= least for gap, least in zip(gaps, (0.2, 0.4, 0.4, 0.4), strict=True)] == [True] * 4


async def test_a_start_that_is_no_use_is_not_repeated(program, journal) -> None:
    failing = program("engine", f"parent.give_up('unknown option'); sys.exit({EXIT_UNUSABLE})")
    with pytest.raises(ChildFailed, match="the engine does not start: unknown option"):
        await Supervisor([[failing]], lambda *_: None).run(Watch().announce)
    assert journal.events() == ["engine started"]


async def test_an_uncaught_exception_is_the_reason(program) -> None:
    failing = program("engine", "raise RuntimeError('out of memory')")
    with pytest.raises(ChildFailed, match="the engine does not start: RuntimeError: out of memory"):
        await Supervisor([[failing]], lambda *_: None).run(Watch().announce)


async def test_progress_is_passed_on_with_the_name(program) -> None:
    watch = Watch()
    loading = program("engine", "parent.progress('weights', 3, 7)\n" + SERVE)
    supervisor = Supervisor([[loading]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await watch.announced.wait()
    assert watch.progress == [("engine", Progress("weights", 3, 7))]
    supervisor.stop()
    await running


async def test_a_second_stop_ends_at_once(program, journal) -> None:
    deaf = program("gateway", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE)
    watch = Watch()
    supervisor = Supervisor([[deaf]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await watch.announced.wait()
    supervisor.stop()
    await asyncio.sleep(0.1)
    assert not running.done()
    supervisor.stop()
    await asyncio.wait_for(running, 1.0)
    assert supervisor.killed


async def test_a_child_that_does_not_drain_is_killed(program, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_MARGIN_S", 0.2)
    deaf = program("gateway", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE)
    watch = Watch()
    supervisor = Supervisor([[deaf]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await watch.announced.wait()
    supervisor.stop()
    await asyncio.wait_for(running, 5.0)


async def test_a_child_may_take_the_grace_it_gives_to_open_work(program, journal, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_MARGIN_S", 0.1)
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), end()))\n" + SERVE
    watch = Watch()
    supervisor = Supervisor([[replace(program("gateway", slow), grace_s=30.0)]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await journal.wait("gateway ready")
    supervisor.stop()
    await asyncio.wait_for(running, 5.0)
    assert journal.events() == ["gateway started", "gateway ready", "gateway terminated"]


async def test_stopping_while_a_child_waits_for_its_next_start(program, journal, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 100.0)
    supervisor = Supervisor([[program("engine", "sys.exit(1)")]], lambda *_: None)
    running = asyncio.create_task(supervisor.run(Watch().announce))
    await journal.wait("engine started")
    await asyncio.sleep(0.2)
    supervisor.stop()
    await asyncio.wait_for(running, 1.0)


async def test_children_ignore_sigint(program, journal) -> None:
    watch = Watch()
    supervisor = Supervisor([[program("engine", SERVE)]], watch.on_progress)
    running = asyncio.create_task(supervisor.run(watch.announce))
    await watch.announced.wait()
    os.kill(journal.entries()[0][2], signal.SIGINT)
    await asyncio.sleep(0.1)
    supervisor.stop()
    await running
    assert journal.events() == ["engine started", "engine ready", "engine terminated"]


def test_a_child_drains_when_its_supervisor_is_killed(journal) -> None:
    script = f"""
import asyncio, os, sys
from protocol.supervisor import Program, Supervisor
argv = (sys.executable, "-c", {CHILD.format(body=SERVE)!r}, "engine", {str(journal.path)!r})
child = Program("engine", argv, os.environ)
asyncio.run(Supervisor([[child]], print).run(lambda: asyncio.sleep(0)))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)})
    while "engine ready" not in journal.events():
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    while "engine terminated" not in journal.events():
        time.sleep(0.01)


def test_reports_are_read_as_they_were_told() -> None:
    assert parse_report(b'{"phase":"weights","done":1,"total":2}\n') == Progress("weights", 1, 2)
    assert parse_report(b'{"ready":true}\n') == Ready()
    assert parse_report(b'{"reason":"no"}\n') == GaveUp("no")
