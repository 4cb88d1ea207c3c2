"""What each frame means to a gateway, without sockets."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from gateway.connection import Connection, LinkFault
from gateway.rows import Gap
from protocol.codec import WireError, decode_from_gateway, encode
from protocol.messages import (
    PROTOCOL,
    U16,
    Abort,
    AbortReason,
    Admitted,
    BundlePart,
    BundleRequest,
    Finished,
    FinishReason,
    FromEngine,
    FromGateway,
    GatewayBeat,
    Hello,
    Logprobs,
    Phase,
    Reject,
    RejectCode,
    Role,
    Step,
    Submit,
    Welcome,
    f32,
    u32,
)
from protocol.sampling import SamplingParams
from protocol.version import VERSION
from tests.gateway.scripted_engine import BUNDLE, IDLE, SERVING


class Peer:
    """The engine's end: keeps what was sent, feeds what it says."""

    def __init__(self) -> None:
        self.sent: list[FromGateway | None] = []
        self.takes_frames = True
        self.faults: list[str] = []
        self.changes = 0
        self.connection = Connection(self._take, on_change=self._changed, on_fault=self.faults.append)

    def _take(self, frame: bytes) -> bool:
        if self.takes_frames:
            self.sent.append(decode_from_gateway(frame))
        return self.takes_frames

    def _changed(self) -> None:
        self.changes += 1

    def say(self, message: FromEngine) -> None:
        for _ in self.connection.receive(encode(message)) or ():
            pass

    def serve(self) -> Connection:
        self.connection.open()
        self.say(Welcome(PROTOCOL, "e", 1, Phase.SERVING, SERVING))
        return self.connection


class Receiver:
    def __init__(self) -> None:
        self.got: list[object] = []
        self.error: Gap | None = None

    def admitted(self, cached_tokens: int) -> None:
        self.got.append(("admitted", cached_tokens))

    def push(self, first: int, ids: array[int], rows: Logprobs | None, start: int, end: int) -> None:
        self.got.append((first, list(ids[start:end]), rows if rows is None else rows.own[start:end].tolist()))

    def finished(self, message: Finished) -> None:
        if self.error is not None:
            raise self.error
        self.got.append(message.reason)

    def lost(self, reason: str) -> None:
        raise AssertionError("a connection tells nobody itself")


def submit(connection: Connection, receiver: Receiver, *, logprobs: int | None = None) -> int:
    handle = connection.reserve(3)
    connection.submit(Submit(handle, "r", u32([1, 2, 3]), SamplingParams(logprobs=logprobs), 7), receiver)
    return handle


def step(*entries: tuple[int, int, list[int]], logprobs: Logprobs | None = None) -> Step:
    """Entries of (handle, first index, ids)."""
    return Step(
        1,
        u32([handle for handle, _, _ in entries]),
        u32([first for _, first, _ in entries]),
        array(U16, [len(ids) for _, _, ids in entries]),
        u32([token for _, _, ids in entries for token in ids]),
        logprobs,
    )


def finished(handle: int, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(handle, reason, 3, 0, 0)


def test_hello_is_the_first_frame_and_is_said_again_until_it_is_taken() -> None:
    peer = Peer()
    peer.takes_frames = False
    peer.connection.open()
    peer.takes_frames = True
    peer.connection.say_beat()
    peer.connection.say_beat()
    hello, beat = peer.sent
    assert isinstance(hello, Hello)
    assert (hello.protocol, hello.role, hello.build, hello.beat_ms) == (PROTOCOL, Role.GATEWAY, VERSION, 250)
    assert beat == GatewayBeat(0)
    assert peer.faults == []


def test_welcome_twice_is_loading_then_serving() -> None:
    peer = Peer()
    peer.connection.open()
    peer.say(Welcome(PROTOCOL, "e", 1, Phase.LOADING))
    assert (peer.connection.phase, peer.connection.serving) == (Phase.LOADING, None)
    assert not peer.connection.credit.fits(1)
    peer.say(Welcome(PROTOCOL, "e", 1, Phase.SERVING, SERVING))
    assert (peer.connection.phase, peer.connection.serving) == (Phase.SERVING, SERVING)
    assert peer.connection.credit.fits(2048)
    assert not peer.connection.credit.fits(2049)


def test_another_major_version_is_refused() -> None:
    with pytest.raises(LinkFault, match="speaks protocol 2, this gateway 1"):
        Peer().say(Welcome((2, 0), "e", 1, Phase.LOADING))


def test_reject_and_nonsense_are_faults() -> None:
    with pytest.raises(LinkFault, match=r"rejected \(account_lost\): too slow"):
        Peer().say(Reject(RejectCode.ACCOUNT_LOST, "too slow"))
    with pytest.raises(WireError):
        Peer().connection.receive(b"\x08")


def test_an_unknown_kind_is_ignored() -> None:
    assert Peer().connection.receive(b"\xc8\x02\x00\x00\x00{}") is None


def test_tokens_go_to_their_handles() -> None:
    peer, first, second = Peer(), Receiver(), Receiver()
    connection = peer.serve()
    a, b = submit(connection, first), submit(connection, second)
    assert a != b
    peer.say(step((a, 0, [5]), (b, 0, [6, 7]), (a, 1, [8])))
    assert (first.got, second.got) == ([(0, [5], None), (1, [8], None)], [(0, [6, 7], None)])


def test_a_step_pauses_every_32_tokens() -> None:
    peer, receiver = Peer(), Receiver()
    connection = peer.serve()
    handle = submit(connection, receiver)
    tokens = [list(range(40)), [40], [41], list(range(42, 73)), [73]]
    entries = [(handle, ids[0], ids) for ids in tokens]
    work = connection.receive(encode(step(*entries)))
    assert work is not None
    counts = []
    for _ in work:
        counts.append(sum(len(ids) for _, ids, _ in receiver.got))
    assert counts == [40, 73]
    assert len(receiver.got) == 5


def test_a_receiver_is_told_which_tokens_and_rows_of_a_step_are_its() -> None:
    peer, asking, other = Peer(), Receiver(), Receiver()
    connection = peer.serve()
    a, b = submit(connection, asking, logprobs=2), submit(connection, other)
    columns = Logprobs(2, f32([-1, -2, -3]), u32([1, 2, 3]), u32(range(6)), f32([0, -1, -2, -3, -4, -5]))
    peer.say(step((b, 0, [4]), (a, 0, [5, 6]), logprobs=columns))
    assert other.got == [(0, [4], [-1])]
    assert asking.got == [(0, [5, 6], [-2, -3])]


def test_credit_is_used_by_new_work_and_comes_back() -> None:
    peer, receiver = Peer(), Receiver()
    connection = peer.serve()
    handle = submit(connection, receiver)
    assert (connection.credit.requests, connection.credit.tokens) == (1, 3)
    peer.say(Admitted(handle, 2, 0))
    assert (connection.credit.requests, connection.credit.tokens) == (1, 0)
    peer.say(finished(handle))
    assert (connection.credit.requests, connection.credit.tokens) == (0, 0)
    assert receiver.got == [("admitted", 2), FinishReason.LENGTH]

    unused = connection.reserve(100)
    connection.release(unused)
    assert (connection.credit.requests, connection.credit.tokens) == (0, 0)

    resumed = connection.reserve_without_credit()
    assert (connection.credit.requests, connection.credit.tokens) == (0, 0)
    connection.submit(Submit(resumed, "r", u32([1]), SamplingParams(), 7, resume=True), receiver)
    peer.say(finished(resumed))
    assert (connection.credit.requests, connection.credit.tokens) == (0, 0)


def test_beats_resize_the_grant() -> None:
    peer = Peer()
    connection = peer.serve()
    peer.say(replace(IDLE, grant_requests=1, grant_tokens=10))
    assert connection.credit.fits(10)
    assert not connection.credit.fits(11)
    connection.reserve(4)
    assert not connection.credit.fits(4)
    changes = peer.changes
    peer.say(replace(IDLE, grant_requests=2, grant_tokens=10))
    assert connection.credit.fits(6)
    assert peer.changes == changes + 1


def test_a_handle_is_used_again_only_after_its_terminal_frame() -> None:
    peer, receiver = Peer(), Receiver()
    connection = peer.serve()
    first = submit(connection, receiver)
    connection.abort(first, AbortReason.CLIENT)
    assert peer.sent[-1] == Abort(first, AbortReason.CLIENT)
    assert submit(connection, Receiver()) != first
    peer.say(step((first, 0, [9])))  # was on its way
    peer.say(finished(first, FinishReason.ABORT))
    assert receiver.got == []
    assert submit(connection, Receiver()) == first


def test_frames_for_handles_that_are_not_in_use_are_faults() -> None:
    peer = Peer()
    peer.serve()
    for message in (step((7, 0, [1])), finished(7), Admitted(7, 0, 0)):
        with pytest.raises(LinkFault, match="handle 7"):
            peer.say(message)


def test_a_gap_before_the_end_leaves_the_receiver_to_be_told_of_the_loss() -> None:
    peer, receiver = Peer(), Receiver()
    connection = peer.serve()
    handle = submit(connection, receiver)
    receiver.error = Gap("missing")
    with pytest.raises(Gap):
        peer.say(finished(handle))
    assert connection.close() == [receiver]


def test_close_names_those_who_still_wait() -> None:
    peer, first, second = Peer(), Receiver(), Receiver()
    connection = peer.serve()
    submit(connection, first)
    connection.abort(submit(connection, second), AbortReason.CLIENT)
    handle = connection.reserve(1)
    assert connection.close() == [first]
    connection.release(handle)
    connection.abort(handle, AbortReason.CLIENT)


def test_a_socket_that_takes_no_frames_is_a_fault_told_later() -> None:
    peer = Peer()
    connection = peer.serve()
    peer.takes_frames = False
    submit(connection, Receiver())
    assert peer.faults == ["the engine does not take frames"]
    assert not connection.closed


def parts(blob: bytes, size: int) -> list[BundlePart]:
    return [BundlePart(SERVING.bundle, at, len(blob), blob[at : at + size]) for at in range(0, len(blob), size)]


async def test_a_bundle_comes_in_parts_once_for_all_who_wait() -> None:
    peer = Peer()
    connection = peer.serve()
    fetches = [asyncio.create_task(connection.fetch_bundle(SERVING.bundle)) for _ in range(2)]
    await asyncio.sleep(0)
    assert peer.sent.count(BundleRequest(SERVING.bundle)) == 1
    for part in parts(BUNDLE, 10):
        peer.say(part)
    assert await asyncio.gather(*fetches) == [BUNDLE, BUNDLE]
    peer.say(parts(BUNDLE, 10)[0])  # nobody waits for it


async def test_a_bundle_part_out_of_place_is_a_fault() -> None:
    peer = Peer()
    connection = peer.serve()
    fetch = asyncio.create_task(connection.fetch_bundle(SERVING.bundle))
    await asyncio.sleep(0)
    with pytest.raises(LinkFault, match="bundle part at 10"):
        peer.say(parts(BUNDLE, 10)[1])
    connection.close()
    with pytest.raises(LinkFault, match="lost"):
        await fetch
    with pytest.raises(LinkFault, match="closed"):
        await connection.fetch_bundle(SERVING.bundle)
