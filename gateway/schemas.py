"""OpenAI's request bodies to typed requests.

Types are strict: no "1" for 1, no true for 1. What depends on the model (context, vocabulary,
defaults) is checked later, in `gateway.preparation`. Every field is in one of three lists:
honoured (the `Key` tables), accepted without effect (`WITHOUT_EFFECT`), or refused by name when
its value would change the answer (`REFUSED`). Any other name is an error, unless the gateway
runs with --allow-unknown-fields.
"""

from __future__ import annotations

import difflib
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import fields
from gateway.conversation import parse_messages
from gateway.errors import BadRequest
from gateway.templates import Message
from protocol.checks import REQUIRED, Check, Key, Unfit, flag, integer, mapping, sequence, text
from protocol.sampling import (
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_TOKENS_LIMIT,
    shown,
)

log = logging.getLogger(__name__)

MAX_N = 128

#: Whether max_tokens was given, and under which name, so that errors name the client's own field.
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")

#: Fields of SamplingParams that go through as they are; `protocol.sampling` checks their ranges.
_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLING_OTHERS = ("top_k", "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids", "logit_bias")

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
        "verbosity",
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """What both routes have in common. `sampling` holds the sampling fields that were given."""

    model: str  # empty: whichever is served
    sampling: Mapping[str, object]
    max_tokens: int | None
    max_tokens_name: str
    logprobs: int | None
    prompt_logprobs: int | None  # in vLLM's shape
    echoes_logprobs: bool  # those of the prompt stand before the answer's
    bad_words: tuple[str, ...]
    n: int
    seed: int | None
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str
    return_token_ids: bool

    @property
    def prompt_width(self) -> int | None:
        """Alternatives wanted for each token of the prompt, None where its logprobs are not."""
        asked = [self.prompt_logprobs, self.logprobs if self.echoes_logprobs else None]
        return max((k for k in asked if k is not None), default=None)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    options: Options
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_variables: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    options: Options
    prompts: tuple[str | array[int], ...]  # texts or u32 ids
    echo: bool
    add_special_tokens: bool


def parse_json(body: bytes) -> dict[str, object]:
    """The body's object. Bare NaN and Infinity, lone surrogates and bytes that are not UTF-8 are no JSON."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest(f"The body must be a JSON object, got {shown(value)}.")
    return value


def parse_chat(body: Mapping[str, object], *, allow_unknown: bool) -> ChatRequest:
    """A request to /v1/chat/completions. Raises BadRequest naming the field."""
    values = _CHAT.read(body, allow_unknown)
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise BadRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    if values["tools"] and values["tool_choice"] != "none":
        raise BadRequest("tools: tool calls are not parsed; send tool_choice 'none' or leave tools out.", "tools")
    if not values["tools"] and values["tool_choice"] not in ("none", "auto"):
        raise BadRequest(f"tool_choice {shown(values['tool_choice'])} needs tools.", "tool_choice")
    add_generation_prompt = values["add_generation_prompt"]
    if values["continue_final_message"]:
        if add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt cannot both be true: the prompt either goes on "
                "with the last message or begins a new one.",
                "continue_final_message",
            )
        add_generation_prompt = False
        if "content" not in values["messages"][-1]:
            raise BadRequest("continue_final_message needs a last message with content.", "continue_final_message")
    return ChatRequest(
        options=_options(values, (values["top_logprobs"] or 0) if values["logprobs"] else None),
        messages=values["messages"],
        tools=values["tools"],
        add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=values["continue_final_message"],
        add_special_tokens=values["add_special_tokens"],
        template_variables=values["chat_template_kwargs"],
    )


def parse_completion(body: Mapping[str, object], *, allow_unknown: bool) -> CompletionRequest:
    """A request to /v1/completions. Raises BadRequest naming the field."""
    values = _COMPLETION.read(body, allow_unknown)
    num_choices = len(values["prompt"]) * values["n"]
    if num_choices > fields.MAX_CHOICES:
        raise BadRequest(f"prompts times n must be at most {fields.MAX_CHOICES}, got {num_choices}.", "prompt")
    return CompletionRequest(
        options=_options(values, values["logprobs"], echo=values["echo"]),
        prompts=values["prompt"],
        echo=values["echo"],
        add_special_tokens=values["add_special_tokens"],
    )


def _options(values: Mapping[str, Any], logprobs: int | None, *, echo: bool = False) -> Options:
    names = [name for name in MAX_TOKENS_NAMES if values.get(name) is not None]
    stream_options = values["stream_options"]
    if stream_options is not None and not values["stream"]:
        raise BadRequest("stream_options needs stream to be true.", "stream_options")
    if values["prompt_logprobs"] is not None and values["stream"]:
        raise BadRequest(
            "prompt_logprobs come with a whole answer: leave stream out, or use echo with logprobs.", "prompt_logprobs"
        )
    return Options(
        model=values["model"],
        sampling={name: values[name] for name in _SAMPLING_NUMBERS + _SAMPLING_OTHERS if values[name] is not None},
        max_tokens=values[names[0]] if names else None,
        max_tokens_name=names[0] if names else "max_tokens",
        logprobs=logprobs,
        prompt_logprobs=values["prompt_logprobs"],
        echoes_logprobs=echo and logprobs is not None,
        bad_words=values["bad_words"],
        n=values["n"],
        seed=values["seed"],
        stop=values["stop"],
        include_stop=values["include_stop_str_in_output"],
        skip_special_tokens=values["skip_special_tokens"],
        stream=values["stream"],
        include_usage=bool(stream_options) and stream_options["include_usage"],
        continuous_usage=bool(stream_options) and stream_options["continuous_usage_stats"],
        priority=values["priority"],
        cache_salt=values["cache_salt"],
        return_token_ids=values["return_token_ids"],
    )


class _Fields:
    """A route's keys by name. A body has some of them, so only those are gone through."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._checks = {key.name: key.check for key in keys}
        self._defaults = {key.name: key.default for key in keys if key.default is not REQUIRED}
        self._required = [key.name for key in keys if key.default is REQUIRED]

    def read(self, body: Mapping[str, object], allow_unknown: bool) -> dict[str, Any]:
        """Checked values, null counting as absent, after the names of all fields are known."""
        checks, values = self._checks, dict[str, Any](self._defaults)
        given = [(name, value) for name, value in body.items() if value is not None]
        for name, value in given:
            if name not in checks and name not in WITHOUT_EFFECT:
                self._check_other(name, value, body, allow_unknown)
        for name, value in given:
            if (check := checks.get(name)) is not None:
                try:
                    values[name] = check(value)
                except Unfit as error:
                    raise BadRequest(f"{name} {error}.", name) from None
        for name in self._required:
            if name not in values:
                raise BadRequest(f"{name} is required.", name)
        return values

    def _check_other(self, name: str, value: object, body: Mapping[str, object], allow_unknown: bool) -> None:
        """What is not ours to honour: harmless, or an error."""
        if name in REFUSED:
            refused = REFUSED[name]
            if not refused.harmless(value, body):
                raise BadRequest(f"{name} {shown(value)} is not supported: {refused.remedy}.", name)
        elif allow_unknown:
            _log_once(name)
        else:
            raise BadRequest(_unknown(name, self._checks), name)


def _unknown(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:64], names, 1)
    hint = f"did you mean {near[0]}?" if near else "leave it out (or run the gateway with --allow-unknown-fields)."
    return f"Unknown field {shown(name)}; {hint}"


#: Unknown fields that were let through and logged; a client cannot make this grow without bound.
_logged: set[str] = set()
_MAX_LOGGED = 256


def _log_once(name: str) -> None:
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        log.warning("unknown_field_ignored", extra={"field": shown(name)})


# --- the lists -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A field with no support. `harmless(value, body)` says that leaving it out changes nothing."""

    harmless: Callable[[object, Mapping[str, object]], bool]
    remedy: str


def _only(*values: object) -> Callable[[object, Mapping[str, object]], bool]:
    return lambda value, _body: any(value == one and type(value) is type(one) for one in values)


REFUSED: dict[str, Refused] = {
    "audio": Refused(_only(), "answers are text"),
    # The type first: two values of a client may be nested too deeply to be compared.
    "best_of": Refused(
        lambda value, body: type(value) is int and value == (body.get("n") or 1), "it must be equal to n"
    ),
    "function_call": Refused(_only("none"), "use tools"),
    "functions": Refused(_only([]), "use tools"),
    "guided_json": Refused(_only(), "structured output is not offered"),
    "modalities": Refused(_only(["text"]), "answers are text"),
    "reasoning_effort": Refused(_only(), "pass what the model's template knows in chat_template_kwargs"),
    "response_format": Refused(_only({"type": "text"}), "only {'type': 'text'} is"),
    "store": Refused(_only(False), "nothing is stored"),
    "structured_outputs": Refused(_only(), "structured output is not offered"),
    "suffix": Refused(_only(""), "text cannot be inserted"),
    "truncate_prompt_tokens": Refused(_only(-1), "prompts are not cut; shorten the prompt"),
    "use_beam_search": Refused(_only(False), "there is no beam search"),
    "web_search_options": Refused(_only(), "there is no web search"),
}


def _optional(check: Check, *names: str) -> tuple[Key, ...]:
    return tuple(Key(name, check, None) for name in names)


_COUNT = integer(0, MAX_TOKENS_LIMIT)

_SHARED_KEYS = (
    Key("model", text(256), ""),
    *_optional(fields.number, *_SAMPLING_NUMBERS),
    *_optional(integer(-(2**31), 2**31 - 1), "top_k"),
    *_optional(_COUNT, "max_tokens", "min_tokens"),
    *_optional(flag, "ignore_eos"),
    *_optional(sequence(fields.TOKEN_ID, MAX_STOP_IDS), "stop_token_ids"),
    *_optional(fields.allowed_ids, "allowed_token_ids"),
    *_optional(fields.logit_bias, "logit_bias"),
    *_optional(integer(-(2**63), 2**63 - 1), "seed"),
    Key("n", integer(1, MAX_N), 1),
    Key("stop", fields.stop, ()),
    Key("bad_words", fields.bad_words, ()),
    *_optional(integer(0, MAX_LOGPROBS), "prompt_logprobs"),
    Key("include_stop_str_in_output", flag, False),
    Key("skip_special_tokens", flag, True),
    Key("stream", flag, False),
    Key("stream_options", fields.stream_options, None),
    Key("priority", integer(-(2**31), 2**31 - 1), 0),
    Key("cache_salt", fields.salt, ""),
    Key("return_token_ids", flag, False),
)

CHAT_KEYS = (
    *_SHARED_KEYS,
    Key("messages", parse_messages),
    *_optional(_COUNT, "max_completion_tokens"),
    Key("logprobs", flag, False),
    *_optional(integer(0, MAX_LOGPROBS), "top_logprobs"),
    Key("tools", fields.tools, ()),
    Key("tool_choice", fields.anything, "auto"),
    *_optional(flag, "add_generation_prompt"),
    Key("continue_final_message", flag, False),
    Key("add_special_tokens", flag, False),
    Key("chat_template_kwargs", mapping, {}),
)

COMPLETION_KEYS = (
    *_SHARED_KEYS,
    Key("prompt", fields.prompts),
    *_optional(integer(0, MAX_LOGPROBS), "logprobs"),
    Key("echo", flag, False),
    Key("add_special_tokens", flag, True),
)

_CHAT, _COMPLETION = _Fields(CHAT_KEYS), _Fields(COMPLETION_KEYS)
