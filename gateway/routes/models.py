"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.service import service
from protocol.messages import Serving


async def list_models(request: Request) -> Response:
    models = [_described(serving, request) for serving in service(request).router.models()]
    return _json({"object": "list", "data": models})


async def retrieve_model(request: Request) -> Response:
    return _json(_described(service(request).router.serving(request.path_params["model"]), request))


def _described(serving: Serving, request: Request) -> dict[str, object]:
    return {
        "id": serving.model,
        "object": "model",
        "created": request.app.state.started,
        "owned_by": "sluicegate",
        "max_model_len": serving.context_length,
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
