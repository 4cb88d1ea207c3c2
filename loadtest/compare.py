"""The one meaning of "identical": two answers of the API, compared choice by choice.

Compared per choice, after joining deltas: token ids (where `return_token_ids` gave them), text, reasoning, logprobs,
tool calls, finish_reason and stop_reason; and the usage without `cached_tokens`. Ids, times and chunk borders are not
compared. An answer that ended in an error, or a choice without a finish_reason, is identical to nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

import orjson

from loadtest.sse import DONE, EventParser

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call without its id, which is random."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation; None where the server did not give the field."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...] | None
    logprobs: Mapping[str, list[Any] | None] | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is comparable of one chat or text completion, streamed or not."""

    choices: Mapping[int, Choice]
    usage: Json | None
    error: Json | None

    @classmethod
    def from_stream(cls, raw: bytes) -> Self:
        """The answer in the body of a streamed response, as it came over HTTP.

        Raises ValueError for an event that is not JSON or that contradicts an earlier one.
        """
        parser = EventParser()
        return cls.from_events(orjson.loads(data) for data in parser.feed(raw) + parser.finish() if data != DONE)

    @classmethod
    def from_events(cls, events: Iterable[Json]) -> Self:
        """The answer in the decoded events of a stream; `[DONE]` is left out by the caller."""
        joined: dict[int, _JoinedChoice] = {}
        usage: Json | None = None
        error: Json | None = None
        for event in events:
            error = event.get("error") or error
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                joined.setdefault(choice["index"], _JoinedChoice(choice["index"])).add(choice)
        return cls({index: joined[index].finish() for index in sorted(joined)}, usage, error)

    @classmethod
    def from_body(cls, body: Json) -> Self:
        """The answer in the decoded body of an unstreamed response: a stream of one event."""
        return cls.from_events([body])


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two answers differ; `choice` is None for what belongs to the whole answer."""

    choice: int | None
    field: str
    detail: str

    def __str__(self) -> str:
        where = "answer" if self.choice is None else f"choice {self.choice}"
        return f"{where}: {self.field}: {self.detail}"


def differences(expected: Answer, actual: Answer) -> list[Difference]:
    """Every field in which `actual` is not identical to `expected`; empty if they are."""
    found = [
        Difference(None, "error", f"the {name} answer ended in {answer.error!r}")
        for name, answer in (("expected", expected), ("actual", actual))
        if answer.error is not None
    ]
    if not expected.choices and not actual.choices and not found:
        found.append(Difference(None, "choices", "neither answer has any"))
    for index in sorted(expected.choices.keys() | actual.choices.keys()):
        one, other = expected.choices.get(index), actual.choices.get(index)
        if one is None or other is None:
            found.append(
                Difference(index, "choice", f"missing in the {'expected' if one is None else 'actual'} answer")
            )
        else:
            found += _choice_differences(index, one, other)
    one_usage, other_usage = _comparable_usage(expected.usage), _comparable_usage(actual.usage)
    if one_usage != other_usage:
        found.append(Difference(None, "usage", f"expected {one_usage}, got {other_usage}"))
    return found


def _choice_differences(index: int, expected: Choice, actual: Choice) -> list[Difference]:
    found = []
    for name in ("token_ids", "text", "reasoning", "tool_calls"):
        one, other = getattr(expected, name), getattr(actual, name)
        if one != other:
            found.append(Difference(index, name, _describe(one, other)))
    found += _logprob_differences(index, expected.logprobs, actual.logprobs)
    if expected.finish_reason is None or actual.finish_reason is None:
        names = [name for name, c in (("expected", expected), ("actual", actual)) if c.finish_reason is None]
        found.append(Difference(index, "finish_reason", f"the {' and the '.join(names)} choice did not finish"))
    elif expected.finish_reason != actual.finish_reason:
        found.append(Difference(index, "finish_reason", _describe(expected.finish_reason, actual.finish_reason)))
    # 1 == True and 1 == 1.0 in Python; a stop reason is a string or an id, so its type counts.
    if (type(expected.stop_reason), expected.stop_reason) != (type(actual.stop_reason), actual.stop_reason):
        found.append(Difference(index, "stop_reason", _describe(expected.stop_reason, actual.stop_reason)))
    return found


def _logprob_differences(
    index: int, expected: Mapping[str, list[Any] | None] | None, actual: Mapping[str, list[Any] | None] | None
) -> list[Difference]:
    if expected is None or actual is None:
        return [] if expected is actual else [Difference(index, "logprobs", _describe(expected, actual))]
    return [
        Difference(index, f"logprobs.{key}", _describe(expected.get(key), actual.get(key)))
        for key in sorted(expected.keys() | actual.keys())
        if expected.get(key) != actual.get(key)
    ]


def _describe(expected: object, actual: object) -> str:
    """Where two values part; long ones only around that place."""
    both_sequences = isinstance(expected, Sequence) and type(expected) is type(actual)
    if not both_sequences or len(repr(expected)) + len(repr(actual)) < 80:
        return f"expected {expected!r}, got {actual!r}"
    assert isinstance(expected, Sequence)
    assert isinstance(actual, Sequence)
    absent = object()
    pairs = enumerate(zip_longest(expected, actual, fillvalue=absent))
    at = next(i for i, (one, other) in pairs if one != other)
    return (
        f"differs from position {at} of {len(expected)} and {len(actual)}: "
        f"expected {expected[at : at + 8]!r}, got {actual[at : at + 8]!r}"
    )


def _comparable_usage(usage: Json | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    comparable = dict(usage)
    details = dict(comparable.pop("prompt_tokens_details", None) or {})
    details.pop("cached_tokens", None)
    if details:
        comparable["prompt_tokens_details"] = details
    return comparable


@dataclass(slots=True)
class _JoinedCall:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _JoinedChoice:
    """The deltas of one choice so far."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    logprobs: dict[str, list[Any] | None] | None = None
    tool_calls: dict[int, _JoinedCall] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, choice: Json) -> None:
        """Joins one event's choice: a chat delta, a chat message, or a piece of a text completion."""
        message = choice.get("delta") or choice.get("message") or {}
        self.text.append(choice.get("text") or message.get("content") or "")
        self.reasoning.append(message.get("reasoning_content") or message.get("reasoning") or "")
        for position, call in enumerate(message.get("tool_calls") or ()):
            joined = self.tool_calls.setdefault(call.get("index", position), _JoinedCall())
            function = call.get("function") or {}
            joined.name = joined.name or function.get("name") or ""
            joined.arguments.append(function.get("arguments") or "")
        if (ids := choice.get("token_ids")) is not None:
            self.token_ids = (self.token_ids or []) + ids
        if (logprobs := choice.get("logprobs")) is not None:
            self._add_logprobs(logprobs)
        if (reason := choice.get("finish_reason")) is not None:
            if self.finish_reason is not None:
                raise ValueError(f"choice {self.index}: finish_reason {reason!r} after {self.finish_reason!r}")
            self.finish_reason = reason
        if (stop_reason := choice.get("stop_reason")) is not None:
            self.stop_reason = stop_reason

    def _add_logprobs(self, logprobs: Mapping[str, list[Any] | None]) -> None:
        """Chat gives one list (`content`), completions four parallel ones: each is joined under its name."""
        if self.logprobs is None:
            self.logprobs = {}
        for key, values in logprobs.items():
            known = self.logprobs.setdefault(key, None)
            self.logprobs[key] = known if values is None else (known or []) + values

    def finish(self) -> Choice:
        calls = tuple(ToolCall(call.name, "".join(call.arguments)) for _, call in sorted(self.tool_calls.items()))
        return Choice(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            token_ids=None if self.token_ids is None else tuple(self.token_ids),
            logprobs=self.logprobs,
            tool_calls=calls,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
