"""Checks of the fields of a request body that have a form of their own. Each raises `Unfit` with the reason."""

from __future__ import annotations

from array import array

from protocol.checks import Unfit, flag, integer, mapping, sequence, text
from protocol.messages import U32
from protocol.sampling import MAX_ALLOWED_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, shown

#: Prompts times n of one request.
MAX_CHOICES = 1024
#: OpenAI takes 4.
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 1024

TOKEN_ID = integer(0, 2**32 - 1)


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"must be a number, got {shown(value)}")
    return value


def stop(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else sequence(text(MAX_STOP_CHARS), MAX_STOPS)(value)
    for stop in stops:
        text(MAX_STOP_CHARS)(stop)
        if not stop:
            raise Unfit("must not hold an empty string")
    return tuple(dict.fromkeys(stops))


def bad_words(value: object) -> tuple[str, ...]:
    words: tuple[str, ...] = sequence(text(MAX_STOP_CHARS), MAX_BAD_WORDS // 2)(value)
    if "" in words:
        raise Unfit("must not hold an empty string")
    return words


def allowed_ids(value: object) -> tuple[int, ...]:
    ids: tuple[int, ...] = sequence(TOKEN_ID, MAX_ALLOWED_IDS)(value)
    if not ids:
        raise Unfit("must not be empty: no token would be left to choose")
    return ids


def logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    entries = mapping(value)
    if len(entries) > MAX_LOGIT_BIAS:
        raise Unfit(f"must have at most {MAX_LOGIT_BIAS} entries, got {len(entries)}")
    bias = {}
    for key, entry in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise Unfit(f"must map token ids (as strings of digits) to numbers, got the key {shown(key)}")
        bias[int(key)] = float(number(entry))
    return tuple(bias.items())


def stream_options(value: object) -> dict[str, bool]:
    options = {"include_usage": False, "continuous_usage_stats": False}
    for name, entry in mapping(value).items():
        if name not in options and name != "include_obfuscation":
            raise Unfit(f"has an unknown field {shown(name)}")
        options[name] = entry is not None and flag(entry)
    return options


def prompts(value: object) -> tuple[str | array[int], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, array):  # JSON has none: `LLM` makes columns of ids, not empty
        return (value,)
    if not isinstance(value, list) or not value:
        raise Unfit(f"must be a string, a list of token ids, or a list of either, none empty; got {shown(value)}")
    if isinstance(value[0], int):
        return (_prompt_ids(value),)
    if len(value) > MAX_CHOICES:
        raise Unfit(f"must have at most {MAX_CHOICES} prompts, got {len(value)}")
    if all(isinstance(entry, str) for entry in value):
        return tuple(value)
    return tuple(_prompt_ids(entry) for entry in value)


def _prompt_ids(value: object) -> array[int]:
    if not isinstance(value, list) or bool in set(map(type, value)):
        raise Unfit(f"must be a list of token ids where it is not text, got {shown(value)}")
    try:
        return array(U32, value)
    except (TypeError, OverflowError):
        raise Unfit(f"must hold token ids (integers from 0), got {shown(value)}") from None


def salt(value: object) -> str:
    salt = text(MAX_SALT_CHARS)(value)
    if not salt:
        raise Unfit("must have at least 1 character")
    return str(salt)


def tools(value: object) -> tuple[dict[str, object], ...]:
    return tuple(sequence(mapping, 1024)(value))


def anything(value: object) -> object:
    return value
