"""One request to a server that may be disturbed meanwhile: its answer, and a call at each token."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from loadtest.compare import Answer
from loadtest.sse import DONE, EventParser
from loadtest.transport import BadResponse, ConnectionLost, HttpClient

_DETAIL = 300  # characters kept of what a server said about a failure


@dataclass(frozen=True, slots=True)
class Asked:
    """How a request ended. Without an answer, `failure` says why; times are of the client's clock."""

    answer: Answer | None
    failure: str
    status: int
    began_at: float
    ended_at: float
    longest_pause_s: float  # between pieces of the body, the wait for the first included


class _Collector:
    """Receiver of one response. `on_tokens` gets the number of tokens so far, over all choices."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self.status = 0
        self.raw = b""
        self.longest_pause_s = 0.0
        self._on_tokens = on_tokens
        self._num_tokens = 0
        self._parser = EventParser()
        self._last = time.perf_counter()

    def begin(self, status: int) -> None:
        self.status = status

    def feed(self, data: bytes, at: float) -> None:
        self.longest_pause_s = max(self.longest_pause_s, at - self._last)
        self._last = at
        self.raw += data
        if self.status != 200:
            return
        for event in self._parser.feed(data):
            self._num_tokens += _tokens_in(event)
            self._on_tokens(self._num_tokens)


def _tokens_in(event: bytes) -> int:
    """What is no chunk has none here; the comparer complains of it."""
    try:
        choices = () if event == DONE else orjson.loads(event).get("choices") or ()
        return sum(len(choice.get("token_ids") or ()) for choice in choices)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return 0


async def ask(
    client: HttpClient,
    path: str,
    body: Mapping[str, Any],
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> Asked:
    """Never raises for what a server does; nothing is sent twice."""
    collector = _Collector(on_tokens)
    answer, failure = None, ""
    began_at = time.perf_counter()
    try:
        await client.post(path, orjson.dumps(body), collector)
        if collector.status == 200:
            streamed = body.get("stream")
            answer = Answer.from_stream(collector.raw) if streamed else Answer.from_body(orjson.loads(collector.raw))
        else:
            failure = f"status {collector.status}: {collector.raw[:_DETAIL].decode(errors='replace')}"
    except (OSError, ConnectionLost, BadResponse, ValueError) as error:
        failure = f"{type(error).__name__}: {error}"
    return Asked(answer, failure, collector.status, began_at, time.perf_counter(), collector.longest_pause_s)
