"""The body of a request: read, and parsed where it stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeVar

from starlette.requests import Request

from gateway.schemas import parse_json
from gateway.service import service
from gateway.tokenizer import INLINE_BYTES

T_co = TypeVar("T_co", covariant=True)


class Parse(Protocol[T_co]):
    """`gateway.schemas.parse_chat` or `parse_completion`."""

    def __call__(self, body: Mapping[str, object], *, allow_unknown: bool) -> T_co: ...


async def parsed(request: Request, parse: Parse[T_co]) -> T_co:
    """The typed request. Raises BadRequest naming the field, BodyTooLarge, ClientDisconnect."""
    body = await request.body()
    allow_unknown = service(request).allow_unknown_fields
    if len(body) <= INLINE_BYTES:
        return parse(parse_json(body), allow_unknown=allow_unknown)
    # Two megabytes of small values take 150 ms to check.
    return await asyncio.to_thread(lambda: parse(parse_json(body), allow_unknown=allow_unknown))
