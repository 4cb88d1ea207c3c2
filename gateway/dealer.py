"""ZeroMQ as the gateway uses it: one DEALER and its monitor, read by the event loop.

The only file of the gateway that knows ZeroMQ. The DEALER has no routing id: the engine's ROUTER
names connections itself, so identities cannot collide. One Dealer is one life of a connection:
libzmq's own reconnection serves the first connect only, because frames queued meanwhile would
reach a new engine without a Hello.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import zmq
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from gateway.slices import SLICE_S
from protocol.codec import MAX_FRAME

#: Frames that may wait in a socket: more than the Submits and Aborts of the largest grant (twice
#: 1024 requests), so that a full queue means an engine that does not read.
HIGH_WATER = 8192

#: What a full socket refuses waits here for so long, and is tried again this often. As an engine
#: bears with a gateway (`engine.reception`), so this with an engine.
MAX_STUCK_S, _UNSENT_RETRY_S = 5.0, 0.005
#: Bytes that may wait so; one frame may be as large as that alone.
MAX_UNSENT_BYTES = MAX_FRAME

#: A connect that is refused is tried again this often; a `kill -9` is survived that much later.
_RETRY_MS = 100
_CONNECT_TIMEOUT_MS = 5000

Context = zmq.Context[zmq.Socket[bytes]]

#: As a plain number: `&` of an enum's members takes 2 µs.
_READABLE = int(zmq.POLLIN)

_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_monitors = count()


class AddressError(ValueError):
    """An engine address that cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys for connections that leave this machine."""

    public: bytes
    secret: bytes
    server: bytes

    @classmethod
    def load(cls, secret_key_file: Path, server_key_file: Path) -> CurveKeys:
        """From this gateway's own secret certificate and the engines' public one (zmq.auth's format)."""
        try:
            public, secret = zmq.auth.load_certificate(secret_key_file)
            server, _ = zmq.auth.load_certificate(server_key_file)
        except (OSError, ValueError) as error:
            raise AddressError(f"CURVE keys cannot be read: {error}") from error
        if secret is None:
            raise AddressError(f"{secret_key_file} has no secret key; name the file whose name ends in .key_secret.")
        return cls(public, secret, server)


def needs_keys(address: str) -> bool:
    """Whether an address leaves this machine. Raises AddressError for one that is no engine's."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and address != "ipc://":
        return False
    try:
        usable = parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise AddressError(f"engine address {address!r} must be tcp://HOST:PORT or ipc://PATH.")
    host = parts.hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class DealerEvents(Protocol):
    """What a dealer tells its owner, always from the event loop."""

    def connected(self) -> None: ...

    def received(self, frame: bytes) -> Iterator[None] | None:
        """One frame. What is left to do for it comes back as an iterator, advanced in slices."""

    def disconnected(self) -> None:
        """After the last frame that came."""

    def crashed(self, error: BaseException) -> None:
        """A callback raised, which none may do."""


class Dealer:
    """One DEALER and its monitor, read by the event loop in slices.

    zmq.asyncio moves 19 to 29 thousand messages a second; reading all that is ready per wake-up,
    three times that. A ZeroMQ descriptor tells of changes only: after every wake-up and every send
    the socket is read until it has nothing.

    Nothing is sent before the handshake or after a disconnect, so no frame waits for a connection.
    ZMQ_IMMEDIATE would see to that too, but drops what a peer sent just before it went: of 100
    frames and a close, none were read when the event loop came to it.
    """

    def __init__(self, context: Context, address: str, keys: CurveKeys | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner: DealerEvents | None = None
        self._work: Iterator[None] | None = None
        self._read_is_due = False
        self._peer_is_here = False
        self._peer_is_gone = False
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._stuck_since = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.RECONNECT_IVL, _RETRY_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS),
            (zmq.IPV6, int(address.startswith("tcp://["))),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
            self._socket.curve_serverkey = keys.server
        endpoint = f"inproc://monitor-{next(_monitors)}"
        self._socket.monitor(endpoint, _WATCHED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(endpoint)
        self._address = address

    def open(self, owner: DealerEvents) -> None:
        self._owner = owner
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._socket.connect(self._address)
        self._loop.call_soon(self._read_monitor)

    def send(self, frame: bytes) -> bool:
        """Whether the frame was taken; not while unconnected, nor when the peer has read too little for too long.

        For a peer that has gone every frame is: `disconnected` tells of it, after the last that came.
        """
        if self._peer_is_gone:
            return True
        if self._owner is None or not self._peer_is_here:
            return False
        if not self._unsent and self._is_sent(frame):
            return True
        if not self._unsent:
            self._stuck_since = time.monotonic()
            self._retry = self._loop.call_later(_UNSENT_RETRY_S, self._send_unsent)
        elif time.monotonic() - self._stuck_since > MAX_STUCK_S or self._unsent_bytes > MAX_UNSENT_BYTES:
            return False
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        return True

    def _is_sent(self, frame: bytes) -> bool:
        """Whether the socket took it."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & _READABLE:
            self._read_soon()  # sending took the wake-up that told of it
        return True

    def _send_unsent(self) -> None:
        try:
            # A peer that has gone gets nothing more: the socket would keep it for the next life of the engine.
            while self._unsent and not self._peer_is_gone and self._is_sent(self._unsent[0]):
                self._unsent_bytes -= len(self._unsent.popleft())
                self._stuck_since = time.monotonic()
        except BaseException as error:
            self._crashed(error)
        if self._unsent and not self._peer_is_gone and self._owner is not None:
            self._retry = self._loop.call_later(_UNSENT_RETRY_S, self._send_unsent)

    def close(self) -> None:
        if self._owner is None:
            return
        self._owner = None
        self._work = None
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._monitor.fileno())
        self._loop.remove_reader(self._socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _read_soon(self) -> None:
        if not self._read_is_due:
            self._read_is_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_is_due = False
        try:
            self._read_slice()
        except BaseException as error:
            self._crashed(error)

    def _read_slice(self) -> None:
        until = time.perf_counter() + SLICE_S
        while self._owner is not None:
            if self._work is None:
                try:
                    frame = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    if self._peer_is_gone:
                        self._owner.disconnected()
                    return
                self._work = self._owner.received(frame)
            elif next(self._work, self) is self:
                self._work = None
            if time.perf_counter() > until:
                self._read_soon()
                return

    def _read_monitor(self) -> None:
        try:
            self._read_events()
        except BaseException as error:
            self._crashed(error)

    def _crashed(self, error: BaseException) -> None:
        if self._owner is None:
            raise error
        self._owner.crashed(error)

    def _read_events(self) -> None:
        while self._owner is not None and not self._peer_is_gone:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._peer_is_here = True
                self._owner.connected()
            else:
                self._peer_is_gone = True
                self._read_soon()  # what it sent before it went still counts
