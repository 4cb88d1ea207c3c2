"""Server over real sockets, with the fake backend behind it in a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from engine.core import EngineCore
from engine.inbox import Drain, Inbox
from engine.metrics import EngineMetrics
from engine.server import CurveKeys, ListenError, Server, needs_curve
from engine.status import Status
from protocol import bundle
from protocol.messages import (
    Abort,
    AbortReason,
    BundlePart,
    BundleRequest,
    EngineBeat,
    ErrorCode,
    Finished,
    FinishReason,
    GatewayBeat,
    Hello,
    Phase,
    Reject,
    RejectCode,
    Role,
    Step,
    Submit,
    Welcome,
    u32,
)
from tests.engine.control import Driver, alone, submit
from tests.engine.peer import Peer
from tests.processes import ROOT

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass
class Running:
    server: Server
    core: EngineCore

    @property
    def address(self) -> str:
        return self.server.address

    def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.core.status
            time.sleep(0.005)


@contextmanager
def engine(
    listen: str, *, high_water_mark: int = 1000, curve: CurveKeys | None = None, **values: object
) -> Iterator[Running]:
    driver = Driver(**values)
    inbox = Inbox()
    cores: list[EngineCore] = []  # the server answers before there is one
    server = Server(
        listen,
        inbox,
        status=lambda: cores[0].status if cores else Status(),
        drain_timeout_s=1.0,
        curve=curve,
        high_water_mark=high_water_mark,
    )
    metrics = EngineMetrics(driver.resolved)
    core = EngineCore(driver.resolved, driver.runner, inbox, server.deliver, metrics)
    cores.append(core)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    server.serve(driver.resolved)
    try:
        yield Running(server, core)
    finally:
        inbox.put(Drain(0.0))
        thread.join(10)
        server.close()
        assert not thread.is_alive()


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@pytest.fixture(params=["ipc", "tcp"])
def listen(request: pytest.FixtureRequest, ipc_address: str) -> str:
    return ipc_address if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_hello_first_then_welcome_tokens_and_finished(listen: str, context: Context):
    with engine(listen) as running, Peer(context, running.address) as peer:
        peer.say(GatewayBeat(1))
        assert peer.hear(Reject).code is RejectCode.HELLO_REQUIRED
        serving = peer.greet()
        assert (serving.model, serving.context_length) == ("fake", 512)
        message = submit(3, max_tokens=12, temperature=1.0, seed=9)
        peer.say(message)
        finished = peer.finish(3)
        assert (finished.reason, finished.num_prompt, finished.num_generated) == (FinishReason.LENGTH, 6, 12)
        assert u32(peer.tokens(3)) == alone(message)


def test_beats_come_every_quarter_of_a_second(ipc_address: str, context: Context):
    with engine(ipc_address) as running, Peer(context, running.address) as peer:
        peer.greet()
        peer.hear(EngineBeat)
        started = time.monotonic()
        first = peer.hear(EngineBeat).seq
        assert peer.hear(EngineBeat, lambda beat: beat.seq == first + 4).phase is Phase.SERVING
        assert 0.9 < time.monotonic() - started < 2.5


def test_abort_ends_the_request_within_a_step(ipc_address: str, context: Context):
    with engine(ipc_address, fake_step_ms=20.0) as running, Peer(context, running.address) as peer:
        peer.greet()
        peer.say(submit(1, max_tokens=500))
        peer.hear(Step)
        started = time.monotonic()
        peer.say(Abort(1, AbortReason.CLIENT))
        assert peer.finish(1).reason is FinishReason.ABORT
        assert time.monotonic() - started < 1.0
        running.wait(lambda: running.core.status.free_blocks == 64)


def test_refusals_are_finished_with_an_error_and_the_next_request_works(ipc_address: str, context: Context):
    with engine(ipc_address) as running, Peer(context, running.address) as peer:
        peer.greet()
        peer.say(submit(1, b"x" * 600), submit(2, max_tokens=2))
        refused = peer.finish(1)
        assert refused.error is not None
        assert refused.error.code is ErrorCode.TOO_LONG
        assert peer.finish(2).reason is FinishReason.LENGTH


def test_the_bundle_comes_by_its_hash(listen: str, context: Context):
    with engine(listen) as running, Peer(context, running.address) as peer:
        name = peer.greet().bundle
        peer.say(BundleRequest(name))
        part = peer.hear(BundlePart)
        assert part.total == len(part.data)
        assert bundle.sha256(part.data) == name
        assert sorted(bundle.unpack(part.data)) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


def test_fifty_pairs_of_gateways_with_the_same_handles_and_request_ids_get_their_own_tokens(
    ipc_address: str, context: Context
):
    with ExitStack() as stack:
        running = stack.enter_context(engine(ipc_address, max_num_seqs=32))
        peers = [stack.enter_context(Peer(context, running.address)) for _ in range(2)]
        for peer in peers:
            peer.greet()
        for handle in range(50):
            messages = [
                Submit(handle, "the-same", u32([65 + number, handle]), submit(0, max_tokens=4).sampling, seed=number)
                for number in range(2)
            ]
            for peer, message in zip(peers, messages, strict=True):
                peer.say(message)
            for peer, message in zip(peers, messages, strict=True):
                assert peer.finish(handle).reason is FinishReason.LENGTH
                assert u32(peer.tokens(handle)) == alone(message)


def test_a_gateway_that_stops_reading_at_high_water_mark_one_loses_no_token(listen: str, context: Context):
    with (
        engine(listen, high_water_mark=1, max_num_seqs=32, max_model_len=512, fake_num_blocks=1024) as running,
        Peer(context, running.address, high_water_mark=1) as slow,
        Peer(context, running.address) as other,
    ):
        slow.greet()
        other.greet()
        slow.say(*(submit(handle, b"%d" % handle, max_tokens=400) for handle in range(25)))
        running.wait(lambda: running.core.status.totals.generated >= 9_000)
        time.sleep(1.0)  # far more waits than sockets take
        other.say(submit(1, max_tokens=20))
        assert other.finish(1).reason is FinishReason.LENGTH  # the step loop did not wait
        while len(slow.finished) < 25:
            slow.hear(Finished)
        assert sum(len(slow.tokens(handle)) for handle in range(25)) == 10_000
        steps = [message for message in slow.heard if isinstance(message, Step)]
        assert len(steps) < 400  # joined, not queued one by one


def test_a_gateway_that_leaves_is_noticed_and_its_blocks_are_freed(listen: str, context: Context):
    with engine(listen, fake_step_ms=5.0) as running:
        with Peer(context, running.address) as peer:
            peer.greet()
            peer.say(*(submit(handle, b"x" * 100, max_tokens=400) for handle in range(5)))
            running.wait(lambda: running.core.status.running == 5)
            assert running.server.num_gateways == 1
        running.wait(lambda: running.server.num_gateways == 0, timeout_s=2.0)
        running.wait(lambda: running.core.status.running == 0, timeout_s=2.0)
        assert running.core.status.free_blocks == 64
        assert running.core.status.totals.aborted == 5


CLIENT = """
import sys, zmq
from tests.engine.control import submit
from tests.engine.peer import Peer
from protocol.messages import Step
with zmq.Context() as context, Peer(context, sys.argv[1]) as peer:
    peer.greet()
    peer.say(*(submit(handle, b"x" * 100, max_tokens=400) for handle in range(5)))
    peer.hear(Step)
    print("streaming", flush=True)
    sys.stdin.read()
"""


def test_kill_of_a_gateway_process_frees_its_blocks(listen: str):
    with engine(listen, fake_step_ms=5.0) as running:
        command = [sys.executable, "-c", CLIENT, running.address]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "streaming\n"
            running.wait(lambda: running.core.status.running == 5)  # its frames may be read one by one
            client.kill()
        running.wait(lambda: running.core.status.running == 0, timeout_s=2.0)
        assert running.core.status.free_blocks == 64
        assert running.server.num_gateways == 0


def test_five_hundred_requests_dropped_at_any_moment_leave_nothing(ipc_address: str, context: Context):
    """Waiting, in prefill, decoding: then a request that takes the whole pool is admitted."""
    with (
        engine(ipc_address, max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=32, fake_step_ms=0.2) as running,
        Peer(context, running.address) as peer,
    ):
        serving = peer.greet()
        window = serving.grant_requests
        for handle in range(500):
            peer.say(submit(handle, b"%d" % (handle % 7) * (20 + handle % 150), max_tokens=200))
            if handle >= window - 1:
                victim = handle - window + 1
                peer.say(Abort(victim, AbortReason.CLIENT))
                assert peer.finish(victim).error is None
        for victim in range(500 - window + 1, 500):
            peer.say(Abort(victim, AbortReason.CLIENT))
            assert peer.finish(victim).error is None
        running.wait(lambda: running.core.status.free_blocks == 64)
        peer.say(submit(1000, b"x" * 999, max_tokens=1))
        assert peer.finish(1000).reason is FinishReason.LENGTH
        running.core.scheduler.check()


# --- addresses and keys --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("ipc:///tmp/x.sock", False),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://127.8.9.1:0", False),
        ("tcp://localhost:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://10.0.0.7:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://*:5557", True),
        ("tcp://engine.example:5557", True),
    ],
)
def test_which_addresses_need_keys(address, needed):
    assert needs_curve(address) is needed


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://127.0.0.1", "--listen must be tcp://HOST:PORT or ipc://PATH; got 'tcp://127.0.0.1'."),
        ("127.0.0.1:5557", "must be tcp://HOST:PORT or ipc://PATH"),
        ("http://127.0.0.1:5557", "must be tcp://HOST:PORT or ipc://PATH"),
        ("ipc://", "must be tcp://HOST:PORT or ipc://PATH"),
        ("tcp://0.0.0.0:5557", "can be reached from other machines, which requires --curve-secret-key-file"),
        ("ipc:///tmp/" + "x" * 120, "a socket's path has at most 107 bytes"),
        ("ipc:///nowhere/x.sock", "No such file or directory"),
    ],
)
def test_addresses_that_cannot_be_listened_on(address, text):
    with pytest.raises(ListenError) as raised:
        Server(address, Inbox(), status=Status, drain_timeout_s=1.0)
    assert text in str(raised.value)


def test_an_address_in_use_is_an_error_that_names_it():
    with engine("tcp://127.0.0.1:0") as running, pytest.raises(ListenError) as raised:
        Server(running.address, Inbox(), status=Status, drain_timeout_s=1.0)
    assert str(raised.value) == f"--listen {running.address}: Address already in use."


def test_with_keys_only_gateways_whose_key_is_allowed_are_heard(tmp_path: Path, context: Context):
    own, allowed = tmp_path / "own", tmp_path / "allowed"
    own.mkdir()
    allowed.mkdir()
    _, server_secret = create_certificates(own, "engine")
    _, friend_secret = create_certificates(own, "friend")
    _, stranger_secret = create_certificates(own, "stranger")
    (own / "friend.key").rename(allowed / "friend.key")
    keys = CurveKeys.load(Path(server_secret), allowed)
    with engine("tcp://127.0.0.1:0", curve=keys) as running:
        for secret, welcome in ((friend_secret, True), (stranger_secret, False), (None, False)):
            peer = Peer(context, running.address)
            if secret is not None:
                peer.socket.curve_publickey, peer.socket.curve_secretkey = load_certificate(secret)
                peer.socket.curve_serverkey = keys.public
            with peer:
                peer.say(Hello((1, 0), Role.GATEWAY, "peer", "test"))
                if welcome:
                    assert peer.hear(Welcome).serving is not None
                else:
                    with pytest.raises(AssertionError, match="no Welcome"):
                        peer.hear(Welcome, timeout_s=0.7)


def test_keys_that_cannot_be_used_are_named(tmp_path: Path):
    with pytest.raises(ListenError, match="--curve-secret-key-file: "):
        CurveKeys.load(tmp_path / "none.key_secret", tmp_path)
    public, secret = create_certificates(tmp_path, "engine")
    with pytest.raises(ListenError, match="has no secret key"):
        CurveKeys.load(Path(public), tmp_path)
    with pytest.raises(ListenError, match=r"--curve-allowed-keys-dir: .* is not a folder"):
        CurveKeys.load(Path(secret), tmp_path / "none")
