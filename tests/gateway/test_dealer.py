"""The DEALER over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from gateway import dealer as dealer_module
from gateway.dealer import AddressError, Context, CurveKeys, Dealer, needs_keys
from gateway.slices import SLICE_S
from tests.gateway.scripted_engine import PATIENCE_S, until


class Owner:
    """Keeps what it is told; a frame b"work" is `work` slices of a millisecond each."""

    def __init__(self, work: int = 0) -> None:
        self.connects = self.disconnects = self.slices = 0
        self.frames: list[bytes] = []
        self.crashes: list[BaseException] = []
        self._work = work

    def connected(self) -> None:
        self.connects += 1

    def received(self, frame: bytes) -> Iterator[None] | None:
        if frame == b"bad":
            raise RuntimeError("a fault of our own")
        self.frames.append(frame)
        return self._toil() if frame == b"work" else None

    def _toil(self) -> Iterator[None]:
        for _ in range(self._work):
            time.sleep(0.001)
            self.slices += 1
            yield

    def disconnected(self) -> None:
        self.disconnects += 1

    def crashed(self, error: BaseException) -> None:
        self.crashes.append(error)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def router(context: Context) -> Iterator[zmq.Socket[bytes]]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    yield socket
    socket.close()


def opened(context: Context, address: str, owner: Owner, keys: CurveKeys | None = None) -> Dealer:
    dealer = Dealer(context, address, keys)
    dealer.open(owner)
    return dealer


async def test_frames_go_both_ways_and_none_waits_for_the_next(
    context: Context, router: zmq.Socket[bytes], ipc_address: str
) -> None:
    owner = Owner()
    dealer = opened(context, ipc_address, owner)
    assert not dealer.send(b"too early")
    router.bind(ipc_address)
    await until(lambda: owner.connects == 1)
    assert dealer.send(b"hello")
    peer, hello = router.recv_multipart()
    assert hello == b"hello"
    # Frames that arrive while the gateway sends must be read without another wake-up.
    for number in range(200):
        router.send_multipart((peer, b"%d" % number))
        assert dealer.send(b"beat")
        if number % 10 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(owner.frames) == 200)
    assert owner.frames == [b"%d" % number for number in range(200)]
    dealer.close()
    dealer.close()
    assert not dealer.send(b"too late")


async def test_what_a_full_socket_refuses_waits_in_order_and_not_for_ever(
    context: Context, router: zmq.Socket[bytes], ipc_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer_module, "HIGH_WATER", 1)
    monkeypatch.setattr(dealer_module, "MAX_STUCK_S", 0.2)
    router.setsockopt(zmq.RCVHWM, 1)
    router.bind(ipc_address)
    owner = Owner()
    dealer = opened(context, ipc_address, owner)
    await until(lambda: owner.connects == 1)
    frames = [b"%02d" % number + bytes(2**20) for number in range(20)]  # more than kernel and queues take
    assert all(dealer.send(frame) for frame in frames)
    assert dealer._unsent
    await asyncio.sleep(0.3)
    assert not dealer.send(b"one too many")
    received = []
    async with asyncio.timeout(PATIENCE_S):
        while len(received) < len(frames):
            if router.poll(0):
                received.append(router.recv_multipart()[1])
            await asyncio.sleep(0.001)
    assert received == frames
    assert dealer.send(b"again")
    dealer.close()


async def test_what_waited_for_a_peer_that_went_is_not_sent_to_the_next(
    context: Context, ipc_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer_module, "HIGH_WATER", 1)
    owner = Owner()
    dealer = opened(context, ipc_address, owner)
    with zmq.Context() as other, other.socket(zmq.ROUTER) as first:
        first.setsockopt(zmq.RCVHWM, 1)
        first.bind(ipc_address)
        await until(lambda: owner.connects == 1)
        for _ in range(20):
            dealer.send(bytes(2**20))
        assert dealer._unsent
    await until(lambda: owner.disconnects == 1)
    waiting = len(dealer._unsent)
    await asyncio.sleep(0.1)
    assert len(dealer._unsent) == waiting
    dealer.close()


async def test_what_came_before_the_end_is_read_before_it_is_told(context: Context, ipc_address: str) -> None:
    owner = Owner()
    dealer = opened(context, ipc_address, owner)
    with zmq.Context() as other, other.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 1000)
        router.bind(ipc_address)
        await until(lambda: owner.connects == 1)
        dealer.send(b"hello")
        peer, _ = router.recv_multipart()
        for _ in range(100):
            router.send_multipart((peer, b"last words"))
        router.close()
        other.term()
    await until(lambda: owner.disconnects == 1)
    assert len(owner.frames) == 100
    assert dealer.send(b"lost, as its connection is")
    dealer.close()


async def test_long_work_is_done_in_slices(context: Context, router: zmq.Socket[bytes], ipc_address: str) -> None:
    owner = Owner(work=50)
    router.bind(ipc_address)
    dealer = opened(context, ipc_address, owner)
    await until(lambda: owner.connects == 1)
    dealer.send(b"hello")
    peer, _ = router.recv_multipart()
    router.send_multipart((peer, b"work"))
    router.send_multipart((peer, b"after"))
    seen = []
    while b"after" not in owner.frames:
        await asyncio.sleep(0)
        seen.append(owner.slices)
    assert owner.slices == 50
    most = max(after - before for before, after in itertools.pairwise(seen))
    assert most <= SLICE_S / 0.001 + 1
    dealer.close()


async def test_a_callback_that_raises_is_told(context: Context, router: zmq.Socket[bytes], ipc_address: str) -> None:
    owner = Owner()
    router.bind(ipc_address)
    dealer = opened(context, ipc_address, owner)
    await until(lambda: owner.connects == 1)
    dealer.send(b"hello")
    peer, _ = router.recv_multipart()
    router.send_multipart((peer, b"bad"))
    await until(lambda: bool(owner.crashes))
    assert str(owner.crashes[0]) == "a fault of our own"
    dealer.close()


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("ipc:///tmp/engine.sock", False),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://127.1.2.3:5557", False),
        ("tcp://localhost:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://10.0.0.1:5557", True),
        ("tcp://engine-1:5557", True),
        ("tcp://0.0.0.0:5557", True),
    ],
)
def test_who_needs_keys(address: str, needed: bool) -> None:
    assert needs_keys(address) is needed


@pytest.mark.parametrize(
    "address", ["", "localhost:5557", "http://localhost:5557", "tcp://localhost", "tcp://:5557", "tcp://a:b", "ipc://"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(AddressError, match=r"must be tcp://HOST:PORT or ipc://PATH"):
        needs_keys(address)


async def test_curve(context: Context, router: zmq.Socket[bytes], ipc_address: str, tmp_path: Path) -> None:
    engine_public, engine_secret = zmq.auth.create_certificates(tmp_path, "engine")
    _, gateway_secret = zmq.auth.create_certificates(tmp_path, "gateway")
    router.curve_server = True
    router.curve_publickey, secret = zmq.auth.load_certificate(engine_secret)
    assert secret is not None
    router.curve_secretkey = secret
    router.bind(ipc_address)

    stranger = Owner()
    without_keys = opened(context, ipc_address, stranger)
    owner = Owner()
    dealer = opened(context, ipc_address, owner, CurveKeys.load(Path(gateway_secret), Path(engine_public)))
    await until(lambda: owner.connects == 1)
    assert dealer.send(b"hello")
    peer, frame = router.recv_multipart()
    assert frame == b"hello"
    router.send_multipart((peer, b"welcome"))
    await until(lambda: owner.frames == [b"welcome"])
    assert stranger.connects == 0
    dealer.close()
    without_keys.close()


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "engine")
    with pytest.raises(AddressError, match="no secret key"):
        CurveKeys.load(Path(public), Path(public))
    with pytest.raises(AddressError, match="cannot be read"):
        CurveKeys.load(tmp_path / "absent", Path(secret))
