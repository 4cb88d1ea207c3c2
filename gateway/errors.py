"""The errors a client may see."""

from __future__ import annotations


class GatewayError(Exception):
    """Base of all that becomes an error body."""


class BadRequest(GatewayError):
    """400. `param` names the field, where one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(GatewayError):
    """404."""


class Overloaded(GatewayError):
    """429: no engine has room. `retry_after_s` is for the Retry-After header."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(GatewayError):
    """503: no engine serves."""


class EngineFailed(GatewayError):
    """500: the engine gave up on the choice."""
