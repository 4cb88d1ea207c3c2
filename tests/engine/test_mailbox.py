"""Mailbox: order, joined steps, and what it does when a socket says no."""

from __future__ import annotations

from collections import deque

import pytest

from engine.mailbox import MAX_JOINED_ENTRIES, Mailbox, PeerGone, Sent, join
from protocol.codec import decode_from_engine
from protocol.messages import Admitted, BundlePart, Finished, FinishReason, FromEngine, Logprobs, Step, f32, u32
from tests.engine.control import u16


def step(number: int, *tokens: tuple[int, int, int], k: int = 0) -> Step:
    """`tokens` are (handle, index, id)."""
    handles, firsts, ids = zip(*tokens, strict=True)
    n = len(ids)
    logprobs = Logprobs(k, f32([-1.0] * n), u32([1] * n), u32(list(range(n * k))), f32([-2.0] * n * k)) if k else None
    return Step(number, u32(handles), u32(firsts), u16([1] * n), u32(ids), logprobs)


class Socket:
    """Takes `room` frames, then is full."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.frames: deque[bytes] = deque()
        self.gone = False

    def send(self, frame: bytes) -> Sent:
        if self.gone:
            return Sent.GONE
        if len(self.frames) >= self.room:
            return Sent.FULL
        self.frames.append(frame)
        return Sent.SENT

    def read(self) -> list[FromEngine]:
        messages = [decode_from_engine(frame) for frame in self.frames]
        self.frames.clear()
        return [message for message in messages if message is not None]


def finished(handle: int) -> Finished:
    return Finished(handle, FinishReason.LENGTH, 1, 0, 1)


def test_messages_leave_in_order():
    socket = Socket()
    mailbox = Mailbox(socket.send)
    messages = [Admitted(1, 0, 0), step(1, (1, 0, 65)), finished(1), step(2, (2, 0, 66))]
    for message in messages:
        mailbox.put(message)
    mailbox.flush(0.0)
    assert socket.read() == messages
    assert mailbox.is_empty
    assert mailbox.size == 0


def test_steps_behind_a_refused_frame_are_joined_and_nothing_is_lost():
    socket = Socket(room=1)
    mailbox = Mailbox(socket.send)
    for number in range(4):
        mailbox.put(step(number, (1, number, 65 + number), (2, number, 75 + number)))
        mailbox.flush(float(number))
    assert mailbox.stuck_since == 1.0
    assert socket.read() == [step(0, (1, 0, 65), (2, 0, 75))]
    mailbox.flush(4.0)
    assert socket.read() == [step(1, (1, 1, 66), (2, 1, 76))]
    assert mailbox.stuck_since == 4.0  # a frame went out, so the wait begins anew
    mailbox.flush(5.0)
    assert socket.read() == [step(3, (1, 2, 67), (2, 2, 77), (1, 3, 68), (2, 3, 78))]
    assert mailbox.stuck_since is None
    assert mailbox.is_empty
    assert mailbox.size == 0


def test_steps_are_not_joined_over_another_message_or_another_width_of_logprobs():
    socket = Socket()
    mailbox = Mailbox(socket.send)
    steps = [step(1, (1, 0, 65)), step(2, (1, 1, 66), k=1), step(3, (1, 2, 67), k=1), step(4, (1, 3, 68), k=2)]
    for message in [*steps, finished(2), step(5, (1, 4, 69))]:
        mailbox.put(message)
    mailbox.flush(0.0)
    sent = socket.read()
    assert sent[0] == steps[0]
    assert isinstance(joined := sent[1], Step)
    assert joined.logprobs == Logprobs(1, f32([-1.0] * 2), u32([1, 1]), u32([0, 0]), f32([-2.0] * 2))
    assert (joined.ids, joined.firsts) == (u32([66, 67]), u32([1, 2]))
    assert sent[2:] == [steps[3], finished(2), step(5, (1, 4, 69))]


def test_joined_steps_stay_within_what_the_wire_takes():
    socket = Socket()
    mailbox = Mailbox(socket.send)
    wide = step(1, *((handle, 0, 65) for handle in range(MAX_JOINED_ENTRIES // 2)))
    for _ in range(5):
        mailbox.put(wide)
    mailbox.flush(0.0)
    assert [len(message.handles) for message in socket.read()] == [MAX_JOINED_ENTRIES] * 2 + [MAX_JOINED_ENTRIES // 2]


def test_size_counts_what_waits():
    socket = Socket(room=0)
    mailbox = Mailbox(socket.send)
    mailbox.put(finished(1))
    for number in range(100):
        mailbox.put(step(number, (1, number, 65), k=20))
    assert 100 * 200 < mailbox.size < 100 * 500
    mailbox.flush(0.0)
    assert mailbox.size > 100 * 200
    socket.room = 1000
    mailbox.flush(0.0)
    assert mailbox.size == 0


def test_a_bundle_goes_in_parts_when_nothing_else_waits():
    socket = Socket(room=2)
    mailbox = Mailbox(socket.send)
    blob = bytes(range(256)) * 10_000
    mailbox.put_bundle(blob)
    mailbox.put(finished(1))
    mailbox.flush(0.0)
    mailbox.put(finished(2))
    received: list[FromEngine] = []
    while frames := socket.read():
        received += frames
        mailbox.flush(0.0)
    parts = [message for message in received if isinstance(message, BundlePart)]
    assert received[0] == finished(1)
    assert finished(2) in received
    assert b"".join(part.data for part in parts) == blob
    assert [part.offset for part in parts] == [0, len(parts[0].data), 2 * len(parts[0].data)]
    assert {part.total for part in parts} == {len(blob)}


def test_a_peer_that_is_gone():
    socket = Socket()
    mailbox = Mailbox(socket.send)
    socket.gone = True
    mailbox.flush(0.0)  # nothing to send, nothing to find out
    mailbox.put(finished(1))
    with pytest.raises(PeerGone):
        mailbox.flush(0.0)


def test_one_step_joined_is_itself():
    alone = step(1, (1, 0, 65))
    assert join([alone]) is alone
