"""Every error a client may see, and its status and body: one table.

    GatewayError
      BadRequest                400  invalid_request_error
        ContextLengthExceeded   400  code context_length_exceeded
      Unauthorized              401  authentication_error
      ModelNotFound             404  code model_not_found
      NotFound                  404  a path or method that does not exist
      RequestTimeout            408
      BodyTooLarge              413
      HeadTooLarge              431
      ClientLeft                499  nobody reads it; for the access log
      Overloaded                429  rate_limit_error, Retry-After
      EngineFailed              500  server_error
      Unavailable               503  unavailable_error, Retry-After

Bodies have OpenAI's shape, {"error": {message, type, param, code}}.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from starlette.responses import Response

from protocol.messages import ErrorCode, Failure

#: A message repeats names and values a client sent; none may grow an answer without bound.
MAX_MESSAGE_CHARS = 2000


class GatewayError(Exception):
    """Base of all that becomes an error body. `param` names the field to blame, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequest(GatewayError):
    """The request itself is wrong: the same request can never succeed."""


class ContextLengthExceeded(BadRequest):
    """Prompt and max_tokens do not fit the model's context."""


class Unauthorized(GatewayError):
    """The API key is missing or wrong."""


class ModelNotFound(GatewayError):
    """No engine serves a model of this name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class NotFound(GatewayError):
    """No such path, or it does not take this method."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


class BodyTooLarge(GatewayError):
    """The body is over the limit, and was not parsed."""


class RequestTimeout(GatewayError):
    """The request did not come whole in its time."""


class HeadTooLarge(GatewayError):
    """The request line and headers are over the limit."""


class ClientLeft(GatewayError):
    """The client closed the connection before the answer began."""


class Overloaded(GatewayError):
    """No engine has room. `retry_after_s` is for the Retry-After header."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(GatewayError):
    """No engine serves the model now; one may soon."""


class EngineFailed(GatewayError):
    """The engine gave up on the choice."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the table says of one class. `retry_after_s` is the Retry-After header, 0 for none."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: int = 0


#: Looked up along the class's bases, so that a subclass needs a row only to differ.
ANSWERS: dict[type[GatewayError], Answer] = {
    BadRequest: Answer(400, "invalid_request_error"),
    ContextLengthExceeded: Answer(400, "invalid_request_error", "context_length_exceeded"),
    Unauthorized: Answer(401, "authentication_error", "invalid_api_key"),
    ModelNotFound: Answer(404, "invalid_request_error", "model_not_found"),
    NotFound: Answer(404, "invalid_request_error"),
    BodyTooLarge: Answer(413, "invalid_request_error", "body_too_large"),
    RequestTimeout: Answer(408, "invalid_request_error", "request_timeout"),
    HeadTooLarge: Answer(431, "invalid_request_error", "head_too_large"),
    ClientLeft: Answer(499, "invalid_request_error", "client_left"),
    Overloaded: Answer(429, "rate_limit_error", "overloaded", 1),
    EngineFailed: Answer(500, "server_error", "engine_failed"),
    Unavailable: Answer(503, "unavailable_error", "unavailable", 1),
}

#: What an exception that is none of ours says to the client; its own text goes to the log only.
INTERNAL = EngineFailed("The gateway failed on this request; its log has the reason under this request's id.")


def answer(error: GatewayError) -> Answer:
    """Status, type, code and Retry-After of an error."""
    row = next(ANSWERS[base] for base in type(error).__mro__ if base in ANSWERS)
    if isinstance(error, Overloaded):
        return Answer(row.status, row.type, row.code, max(1, error.retry_after_s))
    if isinstance(error, NotFound):
        return Answer(error.status, row.type)
    return row


def body(error: GatewayError) -> bytes:
    """OpenAI's error body as JSON, the message bounded and always encodable."""
    row = answer(error)
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    message = message.encode("utf-8", "replace").decode("utf-8")
    return orjson.dumps({"error": {"message": message, "type": row.type, "param": error.param, "code": row.code}})


#: Errors by which an engine ends a choice. The two mismatches and `draining` reach a client only
#: when no other engine took the choice.
FAILURES: dict[ErrorCode, type[BadRequest] | type[Overloaded] | type[Unavailable] | type[EngineFailed]] = {
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.TOO_LONG: ContextLengthExceeded,
    ErrorCode.BAD_REQUEST: BadRequest,
    ErrorCode.DIGEST_MISMATCH: Unavailable,
    ErrorCode.NUMERICS_MISMATCH: Unavailable,
    ErrorCode.DEADLINE: EngineFailed,
    ErrorCode.DRAINING: Unavailable,
    ErrorCode.INTERNAL: EngineFailed,
}


def from_failure(failure: Failure) -> GatewayError:
    """The exception for an engine's error."""
    return FAILURES[failure.code](failure.text)


def response(error: GatewayError) -> Response:
    """The whole HTTP answer of an error."""
    row = answer(error)
    headers = {"Retry-After": str(row.retry_after_s)} if row.retry_after_s else None
    return Response(body(error), row.status, headers, media_type="application/json")
