from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from gateway.bodies import parsed
from gateway.errors import BadRequest
from gateway.tokenizer import INLINE_BYTES


def request(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    state = SimpleNamespace(service=SimpleNamespace(allow_unknown_fields=True))
    return Request({"type": "http", "app": SimpleNamespace(state=state)}, receive)


def where(body: Mapping[str, object], *, allow_unknown: bool) -> tuple[str, bool]:
    return threading.current_thread().name, allow_unknown


async def test_a_large_body_is_parsed_in_a_thread() -> None:
    here = threading.current_thread().name
    assert await parsed(request(b"{}"), where) == (here, True)
    name, allow_unknown = await parsed(request(b'{"a":"%s"}' % (b"x" * INLINE_BYTES)), where)
    assert name != here
    assert allow_unknown


@pytest.mark.parametrize("size", [1, INLINE_BYTES])
async def test_a_body_that_is_no_json_is_refused(size: int) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        await parsed(request(b"{" * size), where)
