"""Typed access to config.json, as both generations of transformers write it."""

from __future__ import annotations

from collections.abc import Mapping

from engine.loading.store import ModelError


class ConfigFields:
    """The fields of config.json, or of an object inside it. Every error names the field, the value and what is
    expected. A field that is null counts as absent.
    """

    def __init__(self, values: Mapping[str, object], inside: str = "") -> None:
        """`inside` is the name of the object that `values` are the fields of."""
        self._values = values
        self._prefix = f"{inside}." if inside else ""

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def without(self, *names: str) -> ConfigFields:
        """The same fields but for these."""
        return ConfigFields({name: value for name, value in self._values.items() if name not in names})

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; `default` when the field is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self._error(name, f"must be {kind}, not {value!r}")
        return value

    def integer_or_none(self, name: str, default: int) -> int | None:
        """A positive integer, or None when the field is null; `default` only when it is not there at all."""
        if name in self._values and self._values[name] is None:
            return None
        return self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number; `default` when the field is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._error(name, f"must be a positive number, not {value!r}")
        return float(value)

    def number_or_none(self, name: str, default: float) -> float | None:
        """A positive number, or None when the field is null; `default` only when it is not there at all."""
        if name in self._values and self._values[name] is None:
            return None
        return self.number(name, default)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self._value(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(each, int | float) and 0 < each < float("inf") for each in value)
        ):
            raise self._error(name, f"must be a list of {count} positive numbers, not {value!r}")
        return tuple(float(each) for each in value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, empty when the field is absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self._error(name, f"must be a list of integers, not {value!r}")
        return tuple(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(name, f"must be true or false, not {value!r}")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, None when the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._error(name, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def inner(self, name: str) -> ConfigFields:
        """The object under `name`, empty when the field is absent."""
        value = self._values.get(name, {})
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._error(name, f"must be an object or null, not {value!r}")
        return ConfigFields(value, self._prefix + name)

    def text(self, *names: str, default: str) -> str:
        """The string in the first of these fields that is there."""
        for name in names:
            value = self._values.get(name)
            if isinstance(value, str):
                return value
            if value is not None:
                raise self._error(name, f"must be a string, not {value!r}")
        return default

    def expect(self, name: str, supported: object) -> None:
        """Refuse a field whose value, when given, is another than the supported one (None: any value)."""
        value = self._values.get(name)
        if value is not None and value != supported:
            raise self._error(name, f"is {value!r}; supported is {'null' if supported is None else repr(supported)}")

    def dtype(self) -> str | None:
        """`dtype`, else `torch_dtype` (the older key)."""
        for name in ("dtype", "torch_dtype"):
            value = self._values.get(name)
            if value is None:
                continue
            if value not in ("float32", "bfloat16", "float16"):
                raise self._error(name, f"is {value!r}; supported are float32, bfloat16, float16")
            return str(value)
        return None

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no {self._prefix}{name}, which this architecture needs.")
        return value

    def _error(self, name: str, text: str) -> ModelError:
        return ModelError(f"config.json: {self._prefix}{name} {text}.")
