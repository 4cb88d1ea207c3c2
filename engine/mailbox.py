"""What an engine has to say to one gateway and could not send yet.

A frame that the socket refuses waits here, and the steps behind it are joined into one, so that
a slow gateway costs a bounded amount of memory and no time. Runs on the I/O thread only.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator

from protocol.codec import BUNDLE_PART_BYTES, encode
from protocol.messages import U16, U32, BundlePart, FromEngine, Logprobs, PromptLogprobs, Step

#: Entries of a joined Step. The wire takes 65,536; one engine step has at most 4,096.
MAX_JOINED_ENTRIES = 2**15

#: Waiting bytes of a message that has no columns, roughly.
_PLAIN_BYTES = 256


class Sent(enum.Enum):
    """What became of a frame: FULL has to be tried again, GONE means that the peer is."""

    SENT = enum.auto()
    FULL = enum.auto()
    GONE = enum.auto()


class PeerGone(Exception):
    """The connection does not exist any more."""


class Mailbox:
    """Messages to one gateway, in order; parts of a bundle go when nothing else waits."""

    def __init__(self, send: Callable[[bytes], Sent]) -> None:
        self.size = 0  # bytes waiting, roughly
        self.stuck_since: float | None = None  # monotonic seconds
        self._send = send
        self._refused: bytes | None = None
        self._waiting: deque[FromEngine] = deque()
        self._bundle: Iterator[BundlePart] = iter(())

    @property
    def is_empty(self) -> bool:
        return self._refused is None and not self._waiting

    def put(self, message: FromEngine) -> None:
        self._waiting.append(message)
        self.size += _size(message)

    def put_bundle(self, blob: bytes) -> None:
        """Send a tokenizer bundle in parts, in place of one that is under way."""
        self._bundle = _parts(blob)

    def flush(self, now: float) -> None:
        """Send what the socket takes. Raises PeerGone."""
        while True:
            frame = self._refused or self._next_frame()
            if frame is None:
                return
            match self._send(frame):
                case Sent.SENT:
                    if self._refused is not None:
                        self.size -= len(frame)
                    self._refused = None
                    self.stuck_since = None
                case Sent.FULL:
                    if self._refused is None:
                        self.size += len(frame)
                    self._refused = frame
                    if self.stuck_since is None:
                        self.stuck_since = now
                    return
                case Sent.GONE:
                    raise PeerGone

    def _next_frame(self) -> bytes | None:
        if not self._waiting:
            part = next(self._bundle, None)
            return None if part is None else encode(part)
        message = self._take()
        if isinstance(message, Step):
            message = join([message, *self._take_steps_like(message)])
        return encode(message)

    def _take_steps_like(self, step: Step) -> Iterator[Step]:
        """The Steps behind `step` that can be joined with it."""
        num_entries = len(step.handles)
        while self._waiting and isinstance(following := self._waiting[0], Step):
            num_entries += len(following.handles)
            if num_entries > MAX_JOINED_ENTRIES or _width(following) != _width(step):
                return
            self._take()
            yield following

    def _take(self) -> FromEngine:
        message = self._waiting.popleft()
        self.size -= _size(message)
        return message


def join(steps: list[Step]) -> Step:
    """One Step that says what `steps`, all with logprobs of equal width or all without, say in order."""
    if len(steps) == 1:
        return steps[0]
    joined = Step(steps[-1].step, array(U32), array(U32), array(U16), array(U32), None)
    for step in steps:
        joined.handles.extend(step.handles)
        joined.firsts.extend(step.firsts)
        joined.counts.extend(step.counts)
        joined.ids.extend(step.ids)
    rows = [step.logprobs for step in steps if step.logprobs is not None]
    if not rows:
        return joined
    logprobs = Logprobs(rows[0].k, array("f"), array(U32), array(U32), array("f"))
    for row in rows:
        logprobs.own.extend(row.own)
        logprobs.rank.extend(row.rank)
        logprobs.top_ids.extend(row.top_ids)
        logprobs.top.extend(row.top)
    return Step(joined.step, joined.handles, joined.firsts, joined.counts, joined.ids, logprobs)


def _width(step: Step) -> int:
    """Logprob alternatives a token, 0 without logprobs."""
    return step.logprobs.k if step.logprobs else 0


def _size(message: FromEngine) -> int:
    if isinstance(message, PromptLogprobs):
        return _PLAIN_BYTES + 8 * (message.logprobs.k + 1) * len(message.logprobs.own)
    if not isinstance(message, Step):
        return _PLAIN_BYTES
    logprobs = 8 * (_width(message) + 1) if message.logprobs else 0
    return _PLAIN_BYTES + 10 * len(message.handles) + (4 + logprobs) * len(message.ids)


def _parts(blob: bytes) -> Iterator[BundlePart]:
    name = hashlib.sha256(blob).hexdigest()
    for offset in range(0, len(blob), BUNDLE_PART_BYTES):
        yield BundlePart(name, offset, len(blob), blob[offset : offset + BUNDLE_PART_BYTES])
