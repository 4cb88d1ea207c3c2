"""One streamed completion, measured: what was asked, when its text came, and how it ended.

Times are `time.perf_counter()` of the client. An event counts as text if it carries content, reasoning or a piece of a
tool call; the empty delta with which a chat opens does not, so a server gains no TTFT by sending it early.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from loadtest.sse import DONE, EventParser
from loadtest.transport import BadResponse, ConnectionLost, HttpClient
from loadtest.workload import Prompt

DETAIL_LENGTH = 200  # characters kept of what a server said about a failure


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class FailureKind(StrEnum):
    """Why a request is not among the measured ones."""

    CONNECT = "connect"  # no connection could be made
    HTTP = "http"  # a status other than 200
    DISCONNECT = "disconnect"  # the connection was closed before the end
    PROTOCOL = "protocol"  # not HTTP
    BAD_EVENT = "bad_event"  # an event that is not JSON, or not of the shape of a chunk
    ERROR_EVENT = "error_event"  # an error in the stream
    TRUNCATED = "truncated"  # the stream ended without a finish_reason and without [DONE]
    NO_TEXT = "no_text"  # a complete stream with nothing in it to measure
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    detail: str
    status: int | None = None

    @property
    def key(self) -> str:
        """The name under which the failure is counted; an HTTP failure is counted by its status."""
        return f"{self.kind}_{self.status}" if self.kind is FailureKind.HTTP else str(self.kind)


class TokenSource(StrEnum):
    USAGE = "usage"
    EVENTS = "events"  # the server sent no usage: text events are counted, which is less if it merges tokens


@dataclass(frozen=True, slots=True)
class Target:
    """What every request of a run has in common."""

    model: str
    endpoint: Endpoint
    ignore_eos: bool
    include_usage: bool
    extra_body: Mapping[str, Any]
    timeout_s: float

    def body(self, prompt: Prompt) -> bytes:
        """The request for `prompt`: greedy, streamed; `extra_body` wins."""
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint is Endpoint.CHAT:
            system = [{"role": "system", "content": prompt.prefix}] if prompt.prefix else []
            body["messages"] = [*system, {"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = f"{prompt.prefix}\n{prompt.text}" if prompt.prefix else prompt.text
        body |= {"max_tokens": prompt.output_tokens, "temperature": 0.0, "stream": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body | dict(self.extra_body))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as measured. Times are seconds of the client's clock, `itl_s` the gaps between its text events."""

    sent_at: float
    ended_at: float
    first_text_at: float | None
    last_text_at: float | None
    itl_s: tuple[float, ...]
    num_events: int
    num_tokens: int
    tokens_from: TokenSource
    prompt_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    failure: Failure | None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_text_at is None else self.first_text_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        if self.first_text_at is None or self.last_text_at is None or self.num_tokens < 2:
            return None
        return (self.last_text_at - self.first_text_at) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.sent_at


async def complete(client: HttpClient, target: Target, prompt: Prompt) -> Outcome:
    """Sends `prompt` and reads the answer's stream to the end. Every failure is an outcome; nothing is retried."""
    return await exchange(client, target.endpoint, target.body(prompt), target.timeout_s)


async def exchange(client: HttpClient, endpoint: Endpoint, body: bytes, timeout_s: float) -> Outcome:
    """The same for a body of any making."""
    stream = _StreamMeter()
    failure: Failure | None = None
    sent_at = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await client.post(endpoint.path, body, stream)
    except TimeoutError:  # an OSError too, so it comes first
        failure = Failure(FailureKind.TIMEOUT, f"not complete after {timeout_s:g} s")
    except OSError as error:
        failure = Failure(FailureKind.CONNECT, str(error))
    except ConnectionLost as error:
        failure = Failure(FailureKind.DISCONNECT, str(error))
    except BadResponse as error:
        failure = Failure(FailureKind.PROTOCOL, str(error))
    return stream.outcome(sent_at, time.perf_counter(), failure)


class _StreamMeter:
    """Receiver of one response: keeps times and counts, and no text."""

    def __init__(self) -> None:
        self._parser = EventParser()
        self._status = 0
        self._refusal = b""
        self._failure: Failure | None = None
        self._first_text_at: float | None = None
        self._last_text_at: float | None = None
        self._itl_s: list[float] = []
        self._num_events = 0
        self._usage: Mapping[str, Any] | None = None
        self._finish_reason: str | None = None
        self._done = False

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, data: bytes, at: float) -> None:
        if self._status != 200:
            self._refusal += data[:DETAIL_LENGTH]
            return
        for event in self._parser.feed(data):
            self._on_event(event, at)

    def _on_event(self, data: bytes, at: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = orjson.loads(data)
            self._on_chunk(event, at)
        except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
            self._fail(FailureKind.BAD_EVENT, f"{error}: {data[:DETAIL_LENGTH]!r}")

    def _on_chunk(self, chunk: Mapping[str, Any], at: float) -> None:
        if chunk.get("error"):
            self._fail(FailureKind.ERROR_EVENT, str(chunk["error"]))
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            if _has_text(choice):
                self._on_text(at)
            if choice.get("finish_reason"):
                self._finish_reason = choice["finish_reason"]

    def _on_text(self, at: float) -> None:
        self._num_events += 1
        if self._last_text_at is None:
            self._first_text_at = at
        else:
            self._itl_s.append(at - self._last_text_at)
        self._last_text_at = at

    def _fail(self, kind: FailureKind, detail: str) -> None:
        """The first failure is the cause; later ones follow from it."""
        self._failure = self._failure or Failure(kind, detail[:DETAIL_LENGTH])

    def outcome(self, sent_at: float, ended_at: float, transport_failure: Failure | None) -> Outcome:
        for event in self._parser.finish():
            self._on_event(event, ended_at)
        usage = self._usage or {}
        num_tokens = usage.get("completion_tokens")
        return Outcome(
            sent_at=sent_at,
            ended_at=ended_at,
            first_text_at=self._first_text_at,
            last_text_at=self._last_text_at,
            itl_s=tuple(self._itl_s),
            num_events=self._num_events,
            num_tokens=self._num_events if num_tokens is None else num_tokens,
            tokens_from=TokenSource.EVENTS if num_tokens is None else TokenSource.USAGE,
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            finish_reason=self._finish_reason,
            failure=self._failure or transport_failure or self._incompleteness(),
        )

    def _incompleteness(self) -> Failure | None:
        if self._status != 200:
            detail = self._refusal[:DETAIL_LENGTH].decode(errors="replace")
            return Failure(FailureKind.HTTP, detail, self._status)
        if not self._done and self._finish_reason is None:
            return Failure(FailureKind.TRUNCATED, f"after {self._num_events} text events")
        if self._num_events == 0:
            return Failure(FailureKind.NO_TEXT, f"finish_reason {self._finish_reason!r}")
        return None


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return bool(
        delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    )
