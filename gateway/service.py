"""What the routes share: one object a gateway process, opened and closed with it."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from gateway.client import client
from gateway.errors import BadRequest, Unavailable
from gateway.measures import Measures
from gateway.preparation import Call
from gateway.resume import Dispatcher
from gateway.router import Router
from gateway.texts import Texts
from gateway.tokenizer import INLINE_BYTES
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
        self.texts.start()
        try:
            yield
        finally:
            await self.dispatcher.close()
            await self.texts.close()
            await self.router.close()

    async def serving(self, request: Request, model: str) -> Serving:
        """The served model a request names, or the only one when it names none; waited for while it is away
        (`request.state.waited_s` says how long).

        Raises ModelNotFound, Unavailable, ClientLeft, or BadRequest when there is a choice to make.
        """
        if not model:
            names = self.router.model_names()
            if len(names) > 1:
                raise BadRequest(f"model is required: this gateway serves {', '.join(names)}.", "model")
            model = names[0] if names else ""
        began = time.monotonic()
        try:
            return self.router.serving(model)
        except Unavailable:
            return await client(request.scope).unless_left(self.dispatcher.await_serving(model))
        finally:
            request.state.waited_s = time.monotonic() - began


def service(request: Request) -> Service:
    """The service of the process that answers `request`."""
    return cast(Service, request.app.state.service)


#: W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def call(request: Request) -> Call:
    """Who asks, for the engine's log and traces."""
    traceparent = request.headers.get("traceparent", "")
    traceparent = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
    return Call(request.state.request_id, traceparent, is_large=len(await request.body()) > INLINE_BYTES)
