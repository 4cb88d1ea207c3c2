"""Model name to the engines that serve it, and the line of requests that wait for credit there."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway import dealer
from gateway.bundles import BundleCache
from gateway.connection import Connection, LinkFault
from gateway.dealer import AddressError, CurveKeys
from gateway.engines import EngineLink, LinkSettings, LinkState
from gateway.errors import GatewayError, ModelNotFound, Overloaded, Unavailable
from protocol.messages import Serving
from protocol.metrics import Instruments

log = logging.getLogger(__name__)

#: A bundle is some megabytes; an engine that takes longer than this is busy with worse.
_BUNDLE_TIMEOUT_S = 30.0
_MOVE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`engines` are the addresses of all links there will be. The key files are needed off
    loopback and ipc (`zmq.auth` certificates: this gateway's secret one, the engines' public one)."""

    engines: tuple[str, ...]
    cache_dir: Path
    link: LinkSettings = field(default_factory=LinkSettings)
    curve_secret_key_file: Path | None = None
    curve_server_key_file: Path | None = None


#: An engine that serves, and what.
Offer = tuple[EngineLink, Serving]


@dataclass(frozen=True, slots=True)
class Seat:
    """A handle, with its credit where it takes some, on a connection that served when it was given."""

    link: EngineLink
    connection: Connection
    serving: Serving
    handle: int


@dataclass(slots=True)
class _Waiter:
    num_prompt: int
    near: EngineLink | None
    seat: asyncio.Future[Seat]


def stop_process() -> None:
    """After a fault of our own, which was logged: end at once and not with success. What state is
    left cannot be trusted, and whoever supervises starts a new life."""
    os._exit(1)


class Router:
    """The fixed set of links, one for each engine address."""

    def __init__(
        self, settings: RouterSettings, instruments: Instruments, *, on_crash: Callable[[], None] = stop_process
    ) -> None:
        """Raises AddressError for an address that is none, or that needs CURVE keys and has none."""
        if not settings.engines:
            raise AddressError("no engine address; name at least one, such as --engine tcp://127.0.0.1:5557.")
        self._settings = settings
        self._keys = {address: _keys_for(address, settings) for address in settings.engines}
        self._bundles = BundleCache(settings.cache_dir)
        self._serving_gauge = instruments.gauge("engines_serving")
        self._on_crash = on_crash
        self._links: list[EngineLink] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._context: dealer.Context | None = None
        self._lines: dict[str, deque[_Waiter]] = {}
        self._known: dict[str, Serving] = {}  # what was last served under each name
        self._expecting: set[asyncio.Future[None]] = set()
        self._moved_at = -float("inf")
        self._last_offers: list[Offer] = []
        self._watchers: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Open the links."""
        self._context = dealer.Context()
        for address, keys in self._keys.items():
            link = EngineLink(
                address,
                self._settings.link,
                context=self._context,
                keys=keys,
                on_change=self._changed,
                may_move=self._may_move,
            )
            self._links.append(link)
            task = asyncio.create_task(link.run(), name=f"link {address}")
            task.add_done_callback(self._link_ended)
            self._tasks.append(task)

    async def close(self) -> None:
        """Close the links; what still hangs on them is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.term()

    def _link_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("link_crashed", exc_info=error, extra={"task": task.get_name()})
            self._on_crash()

    # --- what is served --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether any engine serves."""
        return any(link.serving is not None for link in self._links)

    def models(self) -> list[Serving]:
        """What is served now, one entry a name, sorted by name."""
        by_name = {serving.model: serving for _, serving in self._offers()}
        return [by_name[name] for name in sorted(by_name)]

    def model_names(self) -> list[str]:
        """Of what is served now, or was while nothing is. Sorted."""
        return [serving.model for serving in self.models()] or sorted(self._known)

    def serving(self, model: str) -> Serving:
        """Limits, defaults and bundle hash of a served name. Raises ModelNotFound or Unavailable."""
        for _, serving in self._offers():
            if serving.model == model:
                return serving
        names = ", ".join(s.model for s in self.models())
        loading = any(link.state is LinkState.LOADING for link in self._links)
        if model in self._known or loading or not names:
            what = f"the model {model!r}" if model else "a model"
            raise Unavailable(f"no engine serves {what} at the moment.")
        raise ModelNotFound(f"the model {model!r} does not exist; this server has {names}.")

    def last_serving(self, model: str) -> Serving:
        """As `serving`, also while all engines of a model are away."""
        return self._known.get(model) or self.serving(model)

    async def await_serving(self, model: str, wait_s: float) -> Serving:
        """As `serving`, but an engine that had the model and is away gets `wait_s` seconds to come back."""
        until = time.monotonic() + wait_s
        while True:
            try:
                return self.serving(model)
            except Unavailable:
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._may_come_back(model):
                    raise
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._expecting.add(change)
            try:
                await asyncio.wait([change], timeout=left_s)
                if change.done():
                    change.result()
            finally:
                self._expecting.discard(change)

    def _may_come_back(self, model: str) -> bool:
        """Whether the model was served, and some link has no engine that serves."""
        return model in self._known and any(link.serving is None for link in self._links)

    def _offers(self) -> Iterator[Offer]:
        for link in self._links:
            if (serving := link.serving) is not None:
                yield link, serving

    async def fetch_bundle(self, sha256: str) -> bytes:
        """The tokenizer bundle, verified: from the disk cache, else from an engine. Raises Unavailable."""
        cached = await self._bundles.load(sha256)
        if cached is not None:
            return cached
        for link, serving in list(self._offers()):
            if serving.bundle != sha256 or link.connection is None:
                continue
            try:
                async with asyncio.timeout(_BUNDLE_TIMEOUT_S):
                    blob = await link.connection.fetch_bundle(sha256)
            except (LinkFault, TimeoutError) as error:
                log.warning("bundle_failed", extra={"engine": link.address, "reason": str(error) or "timeout"})
                continue
            if await self._bundles.store(sha256, blob):
                return blob
            log.error("bundle_damaged", extra={"engine": link.address, "sha256": sha256})
        raise Unavailable("no engine could send the tokenizer of this model; try again.")

    # --- seats -----------------------------------------------------------------------------------

    async def acquire(
        self, model: str, num_prompt: int, *, wait_s: float, patient: bool = False, near: EngineLink | None = None
    ) -> Seat:
        """A seat for new work, first come first served; at `near`, if it has credit.

        Raises ModelNotFound for a model that never was, and Unavailable or Overloaded when in `wait_s`
        seconds no engine came or none had credit. The `patient` wait on while an engine serves.
        """
        line = self._lines.get(model)
        if line is None and (seat := self._seat_with_credit(model, num_prompt, near)) is not None:
            return seat
        if not patient and not self._may_come_back(model):
            self.serving(model)
        if line is None:
            line = self._lines[model] = deque()
        waiter = _Waiter(num_prompt, near, asyncio.get_running_loop().create_future())
        line.append(waiter)
        try:
            while not waiter.seat.done():
                await asyncio.wait([waiter.seat], timeout=wait_s)
                if not waiter.seat.done():
                    self.serving(model)
                    if not patient:
                        raise Overloaded(f"every engine that serves {model!r} is busy; no room came in {wait_s:.3g} s.")
            return waiter.seat.result()
        except BaseException:
            self._give_up(waiter)
            raise

    def dismiss_waiting(self, error: GatewayError) -> None:
        """Raise `error` in everybody who waits for an engine or a seat."""
        for waiter in [waiter for line in self._lines.values() for waiter in line]:
            if not waiter.seat.done():
                waiter.seat.set_exception(error)
        for change in self._expecting:
            if not change.done():
                change.set_exception(error)

    def _give_up(self, waiter: _Waiter) -> None:
        """Leave the line; a seat that came in the same moment goes to the next."""
        if waiter.seat.done() and not waiter.seat.cancelled() and waiter.seat.exception() is None:
            seat = waiter.seat.result()
            seat.connection.release(seat.handle)
        waiter.seat.cancel()
        self._serve_lines()

    def seat_for_resumed(self, fits: Callable[[Serving], bool]) -> Seat | None:
        """A seat for work that had begun elsewhere, which needs no credit, at the least busy engine."""
        offers = [offer for offer in self._offers() if fits(offer[1])]
        return _seat(_least_busy(offers), None) if offers else None

    def _seat_with_credit(self, model: str, num_prompt: int, near: EngineLink | None) -> Seat | None:
        offers = [
            (link, serving)
            for link, serving in self._offers()
            if serving.model == model and link.connection is not None and link.connection.credit.fits(num_prompt)
        ]
        near_offers = [offer for offer in offers if offer[0] is near]
        return _seat(_least_busy(near_offers or offers), num_prompt) if offers else None

    def _serve_lines(self) -> None:
        """Give out the seats there are. Nobody is overtaken by who came later and needs less."""
        for model, line in list(self._lines.items()):
            while line:
                waiter = line[0]
                if not waiter.seat.done():
                    seat = self._seat_with_credit(model, waiter.num_prompt, waiter.near)
                    if seat is None:
                        break
                    waiter.seat.set_result(seat)
                line.popleft()
            if not line:
                del self._lines[model]

    # --- told by the links -----------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever other engines serve than before."""
        self._watchers.append(callback)

    def _changed(self) -> None:
        """Credit, or what is served, is not what it was."""
        if self._lines:
            self._serve_lines()
        offers = list(self._offers())
        if offers != self._last_offers:
            self._last_offers = offers
            self._serving_gauge.set(len(offers))
            self._known.update((serving.model, serving) for _, serving in offers)
            for change in self._expecting:
                if not change.done():
                    change.set_result(None)
            for callback in self._watchers:
                callback()

    def _may_move(self) -> bool:
        """At most one engine's streams are moved a second: if all stand still, the fault may be here."""
        now = time.monotonic()
        if now - self._moved_at < _MOVE_INTERVAL_S:
            return False
        self._moved_at = now
        return True


def _least_busy(offers: list[Offer]) -> Offer:
    return min(offers, key=lambda offer: offer[0].load)


def _seat(offer: Offer, credited_prompt: int | None) -> Seat:
    """A handle there, with the credit of that many prompt ids, or without for None."""
    link, serving = offer
    connection = link.connection
    assert connection is not None, "an engine that serves is connected"
    handle = connection.reserve_without_credit() if credited_prompt is None else connection.reserve(credited_prompt)
    return Seat(link, connection, serving, handle)


def _keys_for(address: str, settings: RouterSettings) -> CurveKeys | None:
    if not dealer.needs_keys(address):
        return None
    if settings.curve_secret_key_file is None or settings.curve_server_key_file is None:
        raise AddressError(
            f"engine address {address} leaves this machine, which takes CURVE keys: "
            "give --curve-secret-key-file and --curve-server-key-file, or use ipc or a loopback address."
        )
    return CurveKeys.load(settings.curve_secret_key_file, settings.curve_server_key_file)
