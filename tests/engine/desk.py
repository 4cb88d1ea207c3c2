"""An engine's reception with its socket and its time held by a test."""

from __future__ import annotations

from collections import defaultdict

import pytest

from engine.inbox import Inbox
from engine.mailbox import Sent
from engine.reception import Reception
from protocol.codec import decode_from_engine, encode
from protocol.messages import FromEngine, FromGateway


class Desk:
    """A reception with its socket laid open: peers are byte strings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("engine.reception.time.monotonic", lambda: self.now)
        self.inbox = Inbox()
        self.sent: dict[bytes, list[FromEngine]] = defaultdict(list)
        self.num_refused = 0  # frames for peers that are gone
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.reception = Reception("engine-1", 77, self._send, self.inbox)

    def _send(self, identity: bytes, frame: bytes) -> Sent:
        if identity in self.gone:
            self.num_refused += 1
            return Sent.GONE
        if identity in self.full:
            return Sent.FULL
        message = decode_from_engine(frame)
        assert message is not None
        self.sent[identity].append(message)
        return Sent.SENT

    def says(self, identity: bytes, *messages: FromGateway) -> list[FromEngine]:
        """What the peer hears in return."""
        for message in messages:
            self.reception.receive(identity, encode(message))
        return self.heard(identity)

    def heard(self, identity: bytes) -> list[FromEngine]:
        return self.sent.pop(identity, [])
