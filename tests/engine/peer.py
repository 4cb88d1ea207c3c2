"""A gateway reduced to its socket: a DEALER that says what a test wants and hears everything."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import zmq

from protocol.codec import decode_from_engine, encode
from protocol.messages import (
    Finished,
    FromEngine,
    FromGateway,
    Hello,
    Phase,
    Role,
    Serving,
    Step,
    Welcome,
)

M = TypeVar("M")
TIMEOUT_S = 15.0


class Peer:
    """Connects on entering, closes on leaving. `context` is the test's own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, high_water_mark: int = 1000) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self.address = address
        self.heard: list[FromEngine] = []

    def __enter__(self) -> Peer:
        self.socket.connect(self.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def say(self, *messages: FromGateway) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def hear(self, kind: type[M], when: Callable[[M], bool] = lambda message: True, timeout_s: float = TIMEOUT_S) -> M:
        """Read up to and with the first message of a kind; all that was read is in `heard`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(left * 1000):
                message = decode_from_engine(self.socket.recv())
                if message is not None:
                    self.heard.append(message)
                if isinstance(message, kind) and when(message):
                    return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s; heard {self.heard[-5:]}")

    def hear_all(self) -> None:
        """Read what has arrived."""
        while self.socket.poll(0):
            message = decode_from_engine(self.socket.recv())
            if message is not None:
                self.heard.append(message)

    def greet(self) -> Serving:
        """Hello, and wait until the engine serves."""
        self.say(Hello((1, 0), Role.GATEWAY, "peer", "test"))
        welcome = self.hear(Welcome, lambda message: message.phase is Phase.SERVING)
        assert welcome.serving is not None
        return welcome.serving

    @property
    def finished(self) -> dict[int, Finished]:
        """What was heard so far, by handle."""
        return {message.handle: message for message in self.heard if isinstance(message, Finished)}

    def finish(self, handle: int) -> Finished:
        """The end of a handle, heard already or to come."""
        return self.finished.get(handle) or self.hear(Finished, lambda message: message.handle == handle)

    def tokens(self, handle: int) -> list[int]:
        """The ids heard for a handle, checked to follow one another."""
        ids: list[int] = []
        for message in self.heard:
            if isinstance(message, Step):
                at = 0
                for i, count in enumerate(message.counts):
                    if message.handles[i] == handle:
                        assert message.firsts[i] == len(ids), "a token is repeated or skipped"
                        ids += message.ids[at : at + count]
                    at += count
        return ids
