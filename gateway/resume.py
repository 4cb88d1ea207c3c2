"""Places choices on engines, and again when an engine is lost."""

from __future__ import annotations

from gateway.router import Router
from gateway.stream import Generation, GenerationRequest


class Dispatcher:
    """Starts generations and keeps them going across the lives of engines."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def start(self, request: GenerationRequest) -> Generation:
        """Returns once the request's first choice is with an engine.

        Raises ModelNotFound, Overloaded (no credit within the bounded wait) or Unavailable. If it
        is cancelled while waiting (the client left), nothing stays behind.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Fail what is still open with Unavailable, and wait for the tasks."""
        raise NotImplementedError
