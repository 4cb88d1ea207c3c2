"""The links to engines: reconnection, and when an engine counts as lost."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gateway.connection import Connection, LinkFault
from gateway.dealer import Context, CurveKeys, Dealer
from gateway.rows import Gap
from protocol.codec import WireError
from protocol.messages import BEAT_MS, SILENCE_MS, EngineBeat, Phase, Serving

log = logging.getLogger(__name__)

#: Pause before the next connection after one that was never welcomed; doubled up to the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 8.0
#: An engine that misses this many of its beats (3 s) gets no new work until it is heard again.
_MISSED_BEATS = 12
#: A beat that comes this late means that this process stood still, so silence proves nothing.
_LATE_S = 1.0


class LinkState(enum.Enum):
    CONNECTING = "connecting"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    HUNG = "hung"  # welcomed, but says nothing, or its steps do not end
    DOWN = "down"  # closed, or pausing before the next connection


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """`hang_timeout_s` None takes the engine's own figure; a number can only lower it."""

    hang_timeout_s: float | None = None
    silence_s: float = SILENCE_MS / 1000
    beat_s: float = BEAT_MS / 1000


class EngineLink:
    """The way to one engine address, through all lives of the engine and of the connection.

    `on_change` is called when work may be placed that could not be placed before, or the other way
    round. `may_move` is asked before the streams of a silent or hung engine are moved.
    """

    def __init__(
        self,
        address: str,
        settings: LinkSettings,
        *,
        context: Context,
        keys: CurveKeys | None,
        on_change: Callable[[], None],
        may_move: Callable[[], bool],
    ) -> None:
        self.address = address
        self.connection: Connection | None = None
        self._settings = settings
        self._context = context
        self._keys = keys
        self._on_change = on_change
        self._may_move = may_move
        self._dealer: Dealer | None = None
        self._crash: asyncio.Future[None] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._was_hung = False  # at the end of the connection before; holds until this one's first Beat
        self._is_quiet = False
        self._open_at = 0.0
        self._ticked_at = 0.0

    @property
    def state(self) -> LinkState:
        connection = self.connection
        if connection is None:
            return LinkState.DOWN
        match connection.phase:
            case None:
                return LinkState.CONNECTING
            case Phase.DRAINING:
                return LinkState.DRAINING
            case Phase.SERVING if connection.serving is not None:
                hung = self._was_hung if connection.beat is None else self._is_hung(connection.serving, connection.beat)
                return LinkState.HUNG if hung or self._is_quiet else LinkState.SERVING
            case _:
                return LinkState.LOADING

    @property
    def serving(self) -> Serving | None:
        """What it offers, if work can be sent to it now."""
        if self.connection is None or self.state is not LinkState.SERVING:
            return None
        return self.connection.serving

    @property
    def load(self) -> float:
        """Requests that it has, by its last Beat and ours since, for each that it can run at once."""
        connection = self.connection
        if connection is None or connection.serving is None:
            return 0.0
        known = 0 if connection.beat is None else connection.beat.running + connection.beat.waiting
        num_requests = max(known + connection.submitted_since_beat, connection.num_streams)
        return num_requests / connection.serving.max_num_seqs

    async def run(self) -> None:
        """Keep the link up until cancelled. Raises what went wrong in a callback: a fault of our own."""
        self._crash = asyncio.get_running_loop().create_future()
        self._ticked_at = time.monotonic()
        self._open()
        try:
            while not self._crash.done():
                self._tick()
                await asyncio.wait([self._crash], timeout=self._settings.beat_s)
            self._crash.result()
        finally:
            self._lose("the gateway closed the link")

    # --- lives of the connection -----------------------------------------------------------------

    def _open(self) -> None:
        self._is_quiet = False
        self._dealer = Dealer(self._context, self.address, self._keys)
        self.connection = Connection(self._dealer.send, on_change=self._on_change, on_fault=self._fail_soon)
        self._dealer.open(self)

    def _fail(self, reason: str, *, was_hung: bool = False) -> None:
        """Move on to the next connection: at once after a good life, else after a pause."""
        connection = self.connection
        if connection is None:
            return
        log.warning("link_lost", extra={"engine": self.address, "reason": reason, "streams": connection.num_streams})
        self._was_hung = was_hung
        welcomed = connection.welcome is not None
        self._lose(reason)
        if welcomed:
            self._pause_s = _FIRST_PAUSE_S
            self._open()
        else:
            self._open_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _lose(self, reason: str) -> None:
        """Close the connection and tell whom it served."""
        connection, dealer = self.connection, self._dealer
        if connection is None or dealer is None:
            return
        self.connection = self._dealer = None
        dealer.close()
        for receiver in connection.close():
            receiver.lost(reason)
        self._on_change()

    def _fail_soon(self, reason: str) -> None:
        """`_fail` for a fault found while sending, when others are still at work on the connection."""
        connection = self.connection

        def fail() -> None:
            if self.connection is connection:
                self._fail(reason)

        asyncio.get_running_loop().call_soon(fail)

    def _tick(self) -> None:
        """Every beat: speak, and judge what was heard."""
        now = time.monotonic()
        late = now - self._ticked_at > self._settings.beat_s + _LATE_S
        self._ticked_at = now
        connection = self.connection
        if connection is None:
            if now >= self._open_at:
                self._open()
            return
        if not connection.opened:
            return
        connection.say_beat()
        if late:
            connection.heard_at = now  # this process stood still, so it heard nothing
        is_quiet = now - connection.heard_at > _MISSED_BEATS * self._settings.beat_s
        if is_quiet != self._is_quiet:
            self._is_quiet = is_quiet
            self._on_change()
        reason = self._complaint(connection, now)
        if reason is not None and self._may_move():
            self._fail(reason, was_hung=True)

    def _complaint(self, connection: Connection, now: float) -> str | None:
        """Why the engine counts as lost though its connection stands, if it does."""
        silent_s = now - connection.heard_at
        if silent_s > self._settings.silence_s:
            return f"silent for {silent_s:.1f} s"
        serving, beat = connection.serving, connection.beat
        if not connection.num_streams or serving is None or beat is None:
            return None
        # Who has our work and is silent finishes no steps either: as from a process that was stopped.
        if self._is_hung(serving, beat) or silent_s > self._hang_limit_s(serving, beat):
            return f"no step finished for {beat.step_age_ms / 1000:.1f} s, and silent for {silent_s:.1f} s"
        return None

    def _is_hung(self, serving: Serving, beat: EngineBeat) -> bool:
        """The hung rule: work to do, and no step finished for too long."""
        has_work = beat.running > 0 or beat.waiting > 0
        return has_work and beat.step_age_ms / 1000 > self._hang_limit_s(serving, beat)

    def _hang_limit_s(self, serving: Serving, beat: EngineBeat) -> float:
        limit_s = serving.hang_timeout_ms / 1000
        if self._settings.hang_timeout_s is not None:
            limit_s = min(limit_s, self._settings.hang_timeout_s)
        return max(limit_s, 8 * beat.longest_step_ms / 1000)

    # --- told by the dealer ----------------------------------------------------------------------

    def connected(self) -> None:
        if self.connection is not None:
            self.connection.open()

    def received(self, frame: bytes) -> Iterator[None] | None:
        assert self.connection is not None
        try:
            work = self.connection.receive(frame)
        except (WireError, Gap, LinkFault) as error:
            self._fail(str(error))
            return None
        return None if work is None else self._guarded(work)

    def _guarded(self, work: Iterator[None]) -> Iterator[None]:
        try:
            yield from work
        except (WireError, Gap, LinkFault) as error:
            self._fail(str(error))

    def disconnected(self) -> None:
        self._fail("the connection was lost")

    def crashed(self, error: BaseException) -> None:
        if self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)
