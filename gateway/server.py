"""The HTTP server of one gateway process, and how it stops.

At SIGTERM no new connection is taken; open answers go on for the grace period; what is open then
ends with an error (an event in a stream, a 503 before one), and the process exits with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from gateway.resume import Dispatcher
from gateway.writes import batching_protocol

log = logging.getLogger(__name__)

#: Above the idle time after which nginx drops its side (60 s), so that it never sends into a closing one.
_KEEP_ALIVE_S = 75

#: What error events need to go out after the grace period, before connections are cut.
_CUT_AFTER_S = 2


class Server(uvicorn.Server):
    """Serves an app on a bound socket until SIGTERM or SIGINT."""

    def __init__(
        self,
        app: Starlette,
        dispatcher: Dispatcher,
        *,
        request_timeout_s: float,
        grace_s: float,
        on_listening: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=batching_protocol(request_timeout_s),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(grace_s) + _CUT_AFTER_S,
            )
        )
        self._dispatcher = dispatcher
        self._grace_s = grace_s
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers(), name="end-answers")
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.wait({ending})

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._grace_s)
        log.info("grace_over", extra={"grace_s": self._grace_s})
        await self._dispatcher.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: a stop that was asked for is no
        failure. A signal that is ignored (SIGINT under a supervisor) stays so."""
        handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
