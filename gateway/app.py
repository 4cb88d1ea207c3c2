"""The ASGI application: every route and every middleware, listed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import errors
from gateway.config import BODY_BYTES_PER_TOKEN, MIN_BODY_LIMIT
from gateway.errors import ClientLeft, GatewayError, NotFound
from gateway.middleware import ApiKey, BodyLimit, RequestContext
from gateway.routes.chat import create_chat_completion
from gateway.routes.completions import create_completion
from gateway.routes.models import list_models, retrieve_model
from gateway.routes.ops import health, ready, show_metrics, version
from gateway.service import Service

ROUTES = (
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", show_metrics, methods=["GET"]),
)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send what. An empty `api_key` lets everyone in; `max_body_bytes` 0 follows the context."""

    api_key: str = ""
    max_body_bytes: int = 0


def create_app(
    service: Service, registry: CollectorRegistry, access: Access, workers_dir: str | None = None
) -> Starlette:
    """The application. `registry` and `workers_dir` are what /metrics shows (`protocol.metrics.exposition`)."""

    def body_limit() -> int:
        if access.max_body_bytes:
            return access.max_body_bytes
        longest = max((serving.context_length for serving in service.router.models()), default=0)
        return max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * longest)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(RequestContext, measures=service.measures),
            *([Middleware(ApiKey, key=access.api_key)] if access.api_key else []),
            Middleware(BodyLimit, limit=body_limit, least=access.max_body_bytes or MIN_BODY_LIMIT),
        ],
        exception_handlers={
            GatewayError: _gateway_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_disconnect,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.registry = registry
    app.state.workers_dir = workers_dir
    app.state.started = int(time.time())
    return app


async def _gateway_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return errors.response(error)


async def _client_disconnect(_request: Request, _error: Exception) -> Response:
    return errors.response(ClientLeft("The client closed the connection before its body was whole."))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router of paths says: 404 and 405."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}."
    answer = errors.response(NotFound(text, error.status_code))
    answer.headers.update(error.headers or {})
    return answer
