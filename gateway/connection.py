"""One life of a connection to an engine: handshake, credit, handles, and what each frame means.

Knows no sockets: it is given a way to send and is fed what came. Handles belong to one
connection, so nothing that a lost or woken engine still says can reach a choice that moved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from gateway.rows import Gap
from protocol import bundle
from protocol.codec import decode_from_engine, encode
from protocol.messages import (
    PROTOCOL,
    Abort,
    AbortReason,
    Admitted,
    BundlePart,
    BundleRequest,
    EngineBeat,
    Finished,
    GatewayBeat,
    Hello,
    Logprobs,
    Phase,
    PromptLogprobs,
    Reject,
    Role,
    Serving,
    Step,
    Submit,
    Welcome,
)
from protocol.version import VERSION

log = logging.getLogger(__name__)


#: Tokens of a Step between two looks at the clock, which cost as much as a quarter of a token each.
_SLICE_TOKENS = 32


class LinkFault(Exception):
    """The connection is of no more use; the text is the reason."""


class Push(Protocol):
    def __call__(self, first: int, ids: array[int], rows: Logprobs | None, start: int, end: int) -> None:
        """Tokens from number `first` on: those from `start` to `end` of a frame, with their `rows` if it has any.

        Raises Gap if a token is missing before them.
        """


class Receiver(Protocol):
    """Who a Submit's answers are for. After `finished` or `lost` nothing more comes."""

    @property
    def push(self) -> Push:
        """What takes tokens: nothing that could be left out is between it and the connection."""

    def admitted(self, cached_tokens: int) -> None: ...

    def push_prompt(self, first: int, rows: Logprobs) -> None:
        """Logprobs of prompt tokens from position `first` on. Raises Gap if one is missing before them."""

    def finished(self, message: Finished) -> None:
        """The terminal frame. Raises Gap if tokens are missing before it."""

    def lost(self, reason: str) -> None:
        """The connection is gone."""


@dataclass(slots=True)
class _Stream:
    """What hangs on a handle. Without a receiver only the terminal frame is awaited."""

    credited: bool
    waiting_tokens: int  # prompt ids that count against the grant until it is admitted
    receiver: Receiver | None = None
    push: Push | None = None  # the receiver's

    def answers_to(self, receiver: Receiver | None) -> None:
        self.receiver = receiver
        self.push = None if receiver is None else receiver.push


@dataclass(slots=True)
class _Download:
    """A tokenizer bundle on its way."""

    data: bytearray
    done: asyncio.Future[bytes]


@dataclass(slots=True)
class Credit:
    """What the engine granted and what of it is in use. Resumed work neither needs nor uses any."""

    granted_requests: int = 0
    granted_tokens: int = 0
    requests: int = 0
    tokens: int = 0

    def fits(self, num_prompt: int) -> bool:
        return self.requests < self.granted_requests and self.tokens + num_prompt <= self.granted_tokens


class Connection:
    """The state of one connection, until its owner calls `close`.

    `send` returns whether the socket took the frame. `on_change` is called when credit or
    readiness may have grown, `on_fault` with a reason to close the connection soon, not at once.
    """

    def __init__(
        self, send: Callable[[bytes], bool], *, on_change: Callable[[], None], on_fault: Callable[[str], None]
    ) -> None:
        self._send_frame = send
        self._on_change = on_change
        self._on_fault = on_fault
        self._streams: dict[int, _Stream] = {}
        self._free_handles: deque[int] = deque()
        self._unused_handles = count()
        self._groups = count()
        self._beats = count()
        self._said_hello = False
        self._downloads: dict[str, _Download] = {}
        self.credit = Credit()
        self.closed = False
        self.opened = False
        self.welcome: Welcome | None = None
        self.serving: Serving | None = None
        self.phase: Phase | None = None  # None until Welcome
        self.beat: EngineBeat | None = None
        self.heard_at = time.monotonic()
        self.submitted_since_beat = 0

    @property
    def num_streams(self) -> int:
        """Handles in use."""
        return len(self._streams)

    # --- what a gateway says ---------------------------------------------------------------------

    def open(self) -> None:
        """The socket is connected: say Hello. From here on silence counts."""
        self.opened = True
        self.heard_at = time.monotonic()
        self._say_hello()

    def say_beat(self) -> None:
        if self._said_hello:
            self._send(GatewayBeat(next(self._beats)))
        else:
            self._say_hello()

    def _say_hello(self) -> None:
        """The first frame of all; tried again at every beat until the socket takes it."""
        name = f"{socket.gethostname()[:48]}:{os.getpid()}"
        self._said_hello = self._send_frame(encode(Hello(PROTOCOL, Role.GATEWAY, name, VERSION)))

    def reserve(self, num_prompt: int) -> int:
        """A handle with the credit of a Submit with `num_prompt` prompt ids. `submit` or `release` it."""
        self.credit.requests += 1
        self.credit.tokens += num_prompt
        return self._new_handle(_Stream(credited=True, waiting_tokens=num_prompt))

    def reserve_without_credit(self) -> int:
        """A handle for a Submit that resumes."""
        return self._new_handle(_Stream(credited=False, waiting_tokens=0))

    def _new_handle(self, stream: _Stream) -> int:
        handle = self._free_handles.popleft() if self._free_handles else next(self._unused_handles)
        self._streams[handle] = stream
        return handle

    def release(self, handle: int) -> None:
        """Give a reserved handle back unused."""
        if not self.closed:
            self._forget(handle, self._streams[handle])

    def new_group(self) -> int:
        """A number for siblings that share a prompt on this connection."""
        return next(self._groups) & 0xFFFFFFFF

    def submit(self, message: Submit, receiver: Receiver) -> None:
        """Send `message`, whose handle was reserved. Raises WireError if it cannot be a frame."""
        assert not self.closed
        frame = encode(message)
        stream = self._streams[message.handle]
        stream.answers_to(receiver)
        self.submitted_since_beat += 1
        self._send_encoded(frame)

    def abort(self, handle: int, reason: AbortReason) -> None:
        """Its receiver hears nothing more; the handle stays taken until the terminal frame."""
        stream = self._streams.get(handle)
        if stream is not None:
            stream.answers_to(None)
            self._send(Abort(handle, reason))

    async def fetch_bundle(self, sha256: str) -> bytes:
        """Bytes of the bundle as they came, for the caller to verify. Raises LinkFault."""
        if self.closed:
            raise LinkFault("the connection is closed")
        download = self._downloads.get(sha256)
        if download is None:
            download = _Download(bytearray(), asyncio.get_running_loop().create_future())
            self._downloads[sha256] = download
            self._send(BundleRequest(sha256))
        return await asyncio.shield(download.done)

    def close(self) -> list[Receiver]:
        """End of this life. Returns those who have to be told."""
        self.closed = True
        receivers = [stream.receiver for stream in self._streams.values() if stream.receiver is not None]
        self._streams.clear()
        for download in self._downloads.values():
            download.done.set_exception(LinkFault("the connection was lost"))
            download.done.exception()  # seen, even if nobody waits any more
        self._downloads.clear()
        return receivers

    def _send(self, message: GatewayBeat | Abort | BundleRequest) -> None:
        self._send_encoded(encode(message))

    def _send_encoded(self, frame: bytes) -> None:
        if not self._send_frame(frame):
            self._on_fault("the engine does not take frames")

    # --- what an engine says ---------------------------------------------------------------------

    def receive(self, frame: bytes) -> Iterator[None] | None:
        """Act on one frame. A Step is acted on while its iterator is advanced, some tokens at a time.

        Raises WireError, Gap or LinkFault: the connection is then to be closed.
        """
        self.heard_at = time.monotonic()
        match decode_from_engine(frame):
            case Step() as step:
                return self._on_step(step)
            case PromptLogprobs(handle=handle, first=first, logprobs=rows):
                if (receiver := self._stream(handle).receiver) is not None:
                    receiver.push_prompt(first, rows)
            case Finished() as message:
                self._on_finished(message)
            case Admitted() as message:
                self._on_admitted(message)
            case EngineBeat() as beat:
                self._on_beat(beat)
            case Welcome() as welcome:
                self._on_welcome(welcome)
            case BundlePart() as part:
                self._on_part(part)
            case Reject(code=code, text=text):
                raise LinkFault(f"rejected ({code}): {text}")
            case None:
                pass  # a kind of a later minor version
        return None

    def _stream(self, handle: int) -> _Stream:
        stream = self._streams.get(handle)
        if stream is None:
            raise LinkFault(f"a frame for handle {handle}, which is not in use")
        return stream

    def _on_step(self, step: Step) -> Iterator[None]:
        streams, ids, rows = self._streams, step.ids, step.logprobs
        start = paused_at = 0
        for handle, first, num_ids in zip(step.handles, step.firsts, step.counts, strict=True):
            stream = streams.get(handle) or self._stream(handle)
            end = start + num_ids
            if (push := stream.push) is not None:
                push(first, ids, rows, start, end)
            start = end
            if end - paused_at >= _SLICE_TOKENS:
                paused_at = end
                yield

    def _on_admitted(self, message: Admitted) -> None:
        stream = self._stream(message.handle)
        self.credit.tokens -= stream.waiting_tokens
        stream.waiting_tokens = 0
        self._on_change()
        if stream.receiver is not None:
            stream.receiver.admitted(message.cached_tokens)

    def _on_finished(self, message: Finished) -> None:
        stream = self._stream(message.handle)
        receiver = stream.receiver
        stream.answers_to(None)
        if receiver is not None:
            try:
                receiver.finished(message)
            except Gap:
                stream.answers_to(receiver)  # it goes on elsewhere
                raise
        self._forget(message.handle, stream)

    def _forget(self, handle: int, stream: _Stream) -> None:
        del self._streams[handle]
        self._free_handles.append(handle)
        self.credit.requests -= stream.credited
        self.credit.tokens -= stream.waiting_tokens
        self._on_change()

    def _on_beat(self, beat: EngineBeat) -> None:
        self.beat = beat
        self.phase = beat.phase
        self.submitted_since_beat = 0
        self.credit.granted_requests = beat.grant_requests
        self.credit.granted_tokens = beat.grant_tokens
        self._on_change()

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.protocol[0] != PROTOCOL[0]:
            raise LinkFault(f"the engine speaks protocol {welcome.protocol[0]}, this gateway {PROTOCOL[0]}")
        self.welcome = welcome
        self.phase = welcome.phase
        if welcome.serving is not None:
            self.serving = welcome.serving
            self.credit.granted_requests = welcome.serving.grant_requests
            self.credit.granted_tokens = welcome.serving.grant_tokens
        self._on_change()

    def _on_part(self, part: BundlePart) -> None:
        download = self._downloads.get(part.sha256)
        if download is None:
            return
        if part.offset != len(download.data) or part.total > bundle.MAX_BYTES:
            raise LinkFault(f"bundle part at {part.offset} of {part.total} where {len(download.data)} was next")
        download.data += part.data
        if len(download.data) == part.total:
            del self._downloads[part.sha256]
            download.done.set_result(bytes(download.data))
