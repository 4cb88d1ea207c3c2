"""For operators: /health, /ready, /version, /metrics."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.errors import Unavailable
from gateway.service import service
from protocol import metrics
from protocol.version import VERSION


async def health(request: Request) -> Response:
    """200 while the process lives, whatever its engines do."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """200 once an engine serves and the text side of every model is loaded."""
    shared = service(request)
    if not shared.router.ready:
        raise Unavailable("No engine serves yet.")
    for serving in shared.router.models():
        await shared.texts.get(serving)
    return PlainTextResponse("ready\n")


async def version(request: Request) -> Response:
    return Response(orjson.dumps({"version": VERSION}), media_type="application/json")


async def show_metrics(request: Request) -> Response:
    state = request.app.state
    return Response(metrics.exposition(state.registry, state.workers_dir), media_type=metrics.CONTENT_TYPE)
