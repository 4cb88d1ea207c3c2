"""Inbox: order, and no arrival slept through."""

from __future__ import annotations

import threading
import time

from engine.inbox import Aborted, Inbox


def test_arrivals_are_taken_in_order_and_once():
    inbox = Inbox()
    arrivals = [Aborted(1, handle) for handle in range(5)]
    for arrival in arrivals:
        inbox.put(arrival)
    assert inbox.take() == arrivals
    assert inbox.take() == []


def test_wait_returns_at_once_when_something_is_there_and_after_the_timeout_when_not():
    inbox = Inbox()
    inbox.put(Aborted(1, 1))
    inbox.wait()
    inbox.take()
    started = time.monotonic()
    inbox.wait(0.05)
    assert time.monotonic() - started >= 0.05


def test_nothing_is_slept_through():
    inbox = Inbox()
    taken: list[Aborted] = []

    def read() -> None:
        while len(taken) < 20_000:
            inbox.wait()
            taken.extend(inbox.take())  # type: ignore[arg-type]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for handle in range(20_000):
        inbox.put(Aborted(1, handle))
    reader.join(10)
    assert not reader.is_alive()
    assert [arrival.handle for arrival in taken] == list(range(20_000))
