"""What the routes share: one object a gateway process, opened and closed with it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from gateway.errors import BadRequest
from gateway.measures import Measures
from gateway.preparation import Call
from gateway.resume import Dispatcher
from gateway.router import Router
from gateway.texts import Texts
from protocol.messages import Serving


@dataclass(frozen=True, slots=True)
class Service:
    """Engines, text sides and measures, and how the routes use them."""

    router: Router
    dispatcher: Dispatcher
    texts: Texts
    measures: Measures
    allow_unknown_fields: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Links are open inside; afterwards nothing is left running."""
        await self.router.start()
        try:
            yield
        finally:
            await self.dispatcher.close()
            await self.texts.close()
            await self.router.close()

    def serving(self, model: str) -> Serving:
        """The served model a request names, or the only one when it names none.

        Raises ModelNotFound, Unavailable, or BadRequest when there is a choice to make.
        """
        if model:
            return self.router.serving(model)
        served = self.router.models()
        if len(served) > 1:
            names = ", ".join(each.model for each in served)
            raise BadRequest(f"model is required: this gateway serves {names}.", "model")
        return served[0] if served else self.router.serving(model)


def service(request: Request) -> Service:
    """The service of the process that answers `request`."""
    return cast(Service, request.app.state.service)


#: W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def call(request: Request) -> Call:
    """Who asks, for the engine's log and traces."""
    traceparent = request.headers.get("traceparent", "")
    return Call(request.state.request_id, traceparent if _TRACEPARENT.fullmatch(traceparent) else "")
