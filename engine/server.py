"""The I/O thread: owns the ROUTER socket, the signals and the clock of Beats.

The step loop never waits for a socket: it hands deliveries over and goes on. The decisions are
`engine.reception`'s; this file moves frames. The only place in the engine that knows ZeroMQ.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import secrets
import signal
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.auth.thread import ThreadAuthenticator

from engine.config import Resolved
from engine.events import Delivery
from engine.heap import Heap
from engine.inbox import Drain, Inbox
from engine.mailbox import Sent
from engine.reception import Reception
from engine.status import Status
from engine.step_log import StepLog
from protocol.codec import MAX_FRAME
from protocol.messages import BEAT_MS, Phase

log = logging.getLogger(__name__)

#: Frames that libzmq keeps for one peer in each direction before it says no.
HIGH_WATER_MARK = 1000

#: As plain numbers: `|` and `&` of an enum's members take 2 us.
_NO_WAIT, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

#: Frames taken from the socket before other work gets its turn.
MAX_FRAMES_A_TURN = 256

#: A refused frame is tried again this often.
RETRY_MS = 5

#: The last frames get this long to leave after the socket was closed.
LINGER_MS = 500

#: A step loop that is still there this long after the drain's deadline is given up.
DRAIN_GRACE_S = 5.0

#: Other signals with a handler have nothing to do with sockets.
_STOPS = (signal.SIGTERM, signal.SIGINT)

#: The longest ipc path that fits sockaddr_un with its terminating zero.
MAX_IPC_PATH = 107


class ListenError(Exception):
    """The engine cannot listen where it was asked to; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The engine's CURVE key pair, and the folder with the public keys of gateways that may connect."""

    public: bytes
    secret: bytes
    allowed_dir: Path

    @classmethod
    def load(cls, secret_key_file: Path, allowed_dir: Path) -> CurveKeys:
        """Raises ListenError when there is no usable key pair or folder."""
        try:
            public, secret = load_certificate(secret_key_file)
        except (OSError, ValueError) as error:
            raise ListenError(f"--curve-secret-key-file: {error}") from error
        if secret is None:
            raise ListenError(f"--curve-secret-key-file: {secret_key_file} has no secret key.")
        if not allowed_dir.is_dir():
            raise ListenError(f"--curve-allowed-keys-dir: {allowed_dir} is not a folder.")
        return cls(public, secret, allowed_dir)


@dataclass(frozen=True, slots=True)
class _Serve:
    resolved: Resolved


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Server:
    """Answers gateways from construction on; work is taken once `serve` was called.

    `status` is read for Beats. `wakeup` is a descriptor that gets a byte, its number, for every signal
    (`signal.set_wakeup_fd`): the first SIGTERM or SIGINT drains, the second ends the process at once.
    """

    def __init__(
        self,
        listen: str,
        inbox: Inbox,
        *,
        status: Callable[[], Status],
        drain_timeout_s: float,
        curve: CurveKeys | None = None,
        wakeup: int | None = None,
        step_log: StepLog | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
    ) -> None:
        """Binds. Raises ListenError."""
        if needs_curve(listen) and curve is None:
            raise ListenError(
                f"--listen {listen} can be reached from other machines, which requires --curve-secret-key-file and "
                "--curve-allowed-keys-dir; or listen on 127.0.0.1 or ipc://."
            )
        self._inbox = inbox
        self._status = status
        self._drain_timeout_s = drain_timeout_s
        self._wakeup = wakeup
        self._step_log = step_log
        self._context = zmq.Context()
        self._authenticator = _authenticator(self._context, curve) if curve else None
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self.address = _bind(self._socket, listen, curve, high_water_mark)
        except ListenError:
            self._release(linger_ms=0)
            raise
        self._reception = Reception(
            engine_id=f"{sockets.gethostname()}:{os.getpid()}",
            epoch=secrets.randbits(63),
            send=self._send,
            inbox=inbox,
        )
        self._outbox: deque[list[Delivery] | _Serve | _Stop] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)
        self._thread.start()

    # --- called by other threads -----------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._reception.phase

    @property
    def num_gateways(self) -> int:
        return self._reception.num_accounts

    def serve(self, resolved: Resolved) -> None:
        """The model is loaded: tell the gateways, take work."""
        self._put(_Serve(resolved))

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Messages of the step loop, in order. Never blocks."""
        if deliveries:
            self._put(deliveries)

    def close(self) -> None:
        """Send what was delivered, as far as sockets take it, and end the thread."""
        self._put(_Stop())
        self._thread.join()
        os.close(self._bell)
        if self._step_log is not None:
            self._step_log.close()

    def _put(self, item: list[Delivery] | _Serve | _Stop) -> None:
        self._outbox.append(item)
        os.eventfd_write(self._bell, 1)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            # Without this thread no gateway hears from the step loop again: better a restart.
            log.critical("io_thread_crashed", exc_info=True)
            os._exit(1)
        self._release(LINGER_MS)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        if self._wakeup is not None:
            poller.register(self._wakeup, zmq.POLLIN)
        reception, heap = self._reception, Heap()
        next_tick = time.monotonic()
        while True:
            until_tick = max(0, math.ceil((next_tick - time.monotonic()) * 1000))
            ready = dict(poller.poll(min(RETRY_MS, until_tick) if reception.is_stuck else until_tick))
            if self._socket in ready:
                self._receive()
            if self._wakeup in ready:
                self._on_signal()
            if self._bell in ready and not self._empty_outbox():
                return
            if reception.is_stuck:
                reception.retry()
            if time.monotonic() >= next_tick:
                reception.tick(self._status())
                heap.tick(reception.num_rejected)
                next_tick = time.monotonic() + BEAT_MS / 1000
                self._check_drain()

    def _receive(self) -> None:
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # A message of ours is one frame; of any other the parts are no frames of the protocol.
            self._reception.receive(identity, frames[0] if len(frames) == 1 else b"")

    def _empty_outbox(self) -> bool:
        """Do what other threads asked; False when the thread shall end."""
        os.eventfd_read(self._bell)
        while self._outbox:
            match self._outbox.popleft():
                case _Serve(resolved):
                    self._reception.serve(resolved)
                case _Stop():
                    return False
                case deliveries:
                    if self._step_log is not None:
                        self._step_log.sending(deliveries)
                    self._reception.deliver(deliveries)
        return True

    def _send(self, identity: bytes, frame: bytes) -> Sent:
        try:
            # By its two parts: `send_multipart` looks at every part first.
            self._socket.send(identity, _MORE)
            self._socket.send(frame, _NO_WAIT)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.SENT

    def _on_signal(self) -> None:
        assert self._wakeup is not None
        for number in os.read(self._wakeup, 64):
            if number not in _STOPS:
                continue
            if self._give_up_at is not None or self.phase is Phase.LOADING:
                log.warning("engine_stopped", extra={"phase": self.phase})
                os._exit(1 if self._give_up_at is not None else 0)
            deadline = time.monotonic() + self._drain_timeout_s
            self._give_up_at = deadline + DRAIN_GRACE_S
            log.info("engine_draining", extra={"timeout_s": self._drain_timeout_s})
            self._reception.drain(self._status())
            self._inbox.put(Drain(deadline))

    def _check_drain(self) -> None:
        if self._give_up_at is not None and time.monotonic() > self._give_up_at:
            log.critical("engine_stuck", extra={"step": self._status().step})
            os._exit(1)

    def _release(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def needs_curve(listen: str) -> bool:
    """Whether other machines can reach the address. Raises ListenError for one that is none."""
    scheme, _, rest = listen.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_IPC_PATH:
            raise ListenError(f"--listen {listen}: a socket's path has at most {MAX_IPC_PATH} bytes.")
        return False
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not colon or not port.isdecimal():
        raise ListenError(f"--listen must be tcp://HOST:PORT or ipc://PATH; got {listen!r}.")
    host = host.strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or *
        return True


def _bind(socket: zmq.Socket[bytes], listen: str, curve: CurveKeys | None, high_water_mark: int) -> str:
    """Set up and bind the ROUTER; the address bound, port 0 replaced by the one chosen."""
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if listen.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    if curve is not None:
        socket.curve_server = True
        socket.curve_publickey = curve.public
        socket.curve_secretkey = curve.secret
    try:
        socket.bind(listen)
    except zmq.ZMQError as error:
        raise ListenError(f"--listen {listen}: {zmq.strerror(error.errno or 0)}.") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _authenticator(context: zmq.Context[zmq.Socket[bytes]], curve: CurveKeys) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=curve.allowed_dir)
    return authenticator
