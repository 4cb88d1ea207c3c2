from __future__ import annotations

import json

import pytest

from gateway import errors
from gateway.errors import (
    ANSWERS,
    BadRequest,
    ContextLengthExceeded,
    GatewayError,
    ModelNotFound,
    NotFound,
    Overloaded,
    from_failure,
)
from protocol.messages import ErrorCode, Failure


def test_every_error_has_a_row() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, GatewayError)}
    assert classes - {GatewayError} == set(ANSWERS)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_failure_of_an_engine_is_an_error_with_its_text(code: ErrorCode) -> None:
    error = from_failure(Failure(code, "why"))
    assert str(error) == "why"
    assert 400 <= errors.answer(error).status < 600


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (
            BadRequest("no", "temperature"),
            400,
            {"message": "no", "type": "invalid_request_error", "param": "temperature", "code": None},
        ),
        (
            ContextLengthExceeded("long", "prompt"),
            400,
            {"message": "long", "type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"},
        ),
        (
            ModelNotFound("none"),
            404,
            {"message": "none", "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
        ),
        (
            NotFound("wrong method", 405),
            405,
            {"message": "wrong method", "type": "invalid_request_error", "param": None, "code": None},
        ),
    ],
)
def test_status_and_body(error: GatewayError, status: int, body: dict[str, object]) -> None:
    answer = errors.response(error)
    assert answer.status_code == status
    assert json.loads(bytes(answer.body)) == {"error": body}
    assert "retry-after" not in answer.headers


def test_overload_says_when_to_come_back() -> None:
    assert errors.response(Overloaded("busy", retry_after_s=9)).headers["retry-after"] == "9"
    assert errors.response(Overloaded("busy", retry_after_s=0)).headers["retry-after"] == "1"


def test_messages_are_bounded_and_always_encodable() -> None:
    message = json.loads(errors.body(BadRequest("x" * 1_000_000)))["error"]["message"]
    assert message == "x" * 1997 + "..."
    assert json.loads(errors.body(BadRequest("half \ud83d")))["error"]["message"] == "half ?"
