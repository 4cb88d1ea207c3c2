"""Type and range checks for the values of a wire header.

A check takes a value that orjson decoded and returns the value to keep, or raises `Unfit` with
the reason. `read` applies a table of them; unknown keys are ignored, as minor versions may add
some.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from protocol.sampling import shown

Check = Callable[[object], Any]

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


class Unfit(ValueError):
    """A value is of the wrong type or out of range; the text says what was expected."""


class _Required(enum.Enum):
    REQUIRED = enum.auto()


REQUIRED = _Required.REQUIRED


class Key(NamedTuple):
    """One header key: its check, and the value when absent (REQUIRED: absence is an error)."""

    name: str
    check: Check
    default: object = REQUIRED


def read(header: Mapping[str, object], keys: tuple[Key, ...]) -> dict[str, Any]:
    """The checked values of `keys`. Raises Unfit naming the key."""
    values: dict[str, Any] = {}
    for name, check, default in keys:
        if name not in header:
            if default is REQUIRED:
                raise Unfit(f"{name} is missing")
            values[name] = default
        elif (value := header[name]) is default and value is not None:
            values[name] = value  # the same small number, flag or empty string: half of a Submit's
        else:
            try:
                values[name] = check(value)
            except Unfit as error:
                raise Unfit(f"{name} {error}") from None
    return values


def integer(low: int, high: int) -> Check:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Unfit(f"must be an integer, got {shown(value)}")
        if not low <= value <= high:
            raise Unfit(f"must be between {low} and {high}, got {value}")
        return value

    return check


def text(most: int) -> Check:
    """A string of at most `most` characters."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise Unfit(f"must be a string, got {shown(value)}")
        if len(value) > most:
            raise Unfit(f"must have at most {most} characters, got {len(value)}")
        return value

    return check


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unfit(f"must be true or false, got {shown(value)}")
    return value


def hex_digest(value: object) -> str:
    """A sha256 as 64 lower-case hex digits: safe as a file name."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise Unfit(f"must be 64 lower-case hex digits, got {shown(value)}")
    return value


def mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Unfit(f"must be an object, got {shown(value)}")
    return value


def member(of: type[enum.StrEnum]) -> Check:
    values = frozenset(of)

    def check(value: object) -> enum.StrEnum:
        # Looked up only if it is a string: an enum's own error repeats a value of any size and depth.
        if not isinstance(value, str) or value not in values:
            raise Unfit(f"must be one of {', '.join(of)}, got {shown(value)}")
        return of(value)

    return check


def sequence(item: Check, most: int) -> Check:
    """A list of at most `most` values that pass `item`, as a tuple."""

    def check(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Unfit(f"must be a list, got {shown(value)}")
        if len(value) > most:
            raise Unfit(f"must have at most {most} items, got {len(value)}")
        return tuple(item(entry) for entry in value)

    return check


def pair(item: Check) -> Check:
    def check(value: object) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise Unfit(f"must be a list of two, got {shown(value)}")
        return item(value[0]), item(value[1])

    return check
