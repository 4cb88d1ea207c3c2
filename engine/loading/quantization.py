"""What a model folder says of how its weights are quantized. File names of weights say nothing.

Knows nothing of torch, so that a folder can be looked at without loading anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.loading.store import ModelError, ModelFolder

#: `quant_method` of the formats that are read here, and their names in text.
NAMES = {"awq": "AWQ", "compressed-tensors": "compressed-tensors", "fp8": "FP8", "gptq": "GPTQ"}

#: Keys of config.json, the second of older compressed-tensors; then files, the second of older AutoAWQ.
_KEYS = ("quantization_config", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json")

#: Tensors that only quantized modules have.
_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The description of a quantized checkpoint. `method` is a key of NAMES, `source` where `values` stand."""

    method: str
    source: str
    values: Mapping[str, object]

    @property
    def of_weights(self) -> bool:
        """Whether weights are quantized, in the files or as they are loaded, and not keys and values alone."""
        return self.values.get("config_groups") != {}

    def inner(self, name: str) -> Quantization:
        """The object under `name`. Raises ModelError when it is none."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return Quantization(self.method, f"{self.source}.{name}", value)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer; `default` when the field is absent. Raises ModelError."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` when the field is absent. Raises ModelError."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string in small letters; `default` when the field is absent. Raises ModelError."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value.lower()

    def sizes(self, name: str) -> tuple[int, int] | None:
        """A list of two positive integers; None when the field is absent. Raises ModelError."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2:
            first, second = value
            if isinstance(first, int) and isinstance(second, int) and first > 0 and second > 0:
                return first, second
        raise self.error(name, "must be a list of two positive integers")

    def error(self, name: str, expected: str) -> ModelError:
        """For a field that cannot be used: says its value and what is `expected`."""
        return ModelError(f"{self.source}: {name} is {self.values.get(name)!r}; it {expected}.")


def read_quantization(folder: ModelFolder, asked: str | None) -> Quantization | None:
    """How the weights in `folder` are quantized; None when they are not.

    `asked` (--quantization) only confirms what the folder says. It adds something in one case: "fp8"
    for weights that are not quantized has them quantized while they are loaded; `values` is then empty.
    Raises ModelError when the two contradict, or the format is not known.
    """
    found = _described(folder)
    if found is None:
        if asked == "fp8":
            return Quantization("fp8", "--quantization fp8", {})
        if asked is not None:
            raise ModelError(
                f"--quantization {asked}: nothing in {folder.path} says that its weights are quantized. config.json "
                f"has no {_KEYS[0]}, and there is neither {_FILES[0]} nor {_FILES[1]}. Copy the file that the "
                f"quantizing tool wrote into the folder, or leave --quantization out if the weights are plain."
            )
        return None
    if found.method not in NAMES:
        raise ModelError(
            f"{found.source}: the quantization method is {found.method!r}; supported are {', '.join(NAMES)}."
        )
    if asked is not None and asked != found.method:
        raise ModelError(
            f"--quantization {asked} contradicts the model: {found.source} says {found.method}. "
            f"Leave --quantization out; the format is found by itself."
        )
    return found


def check_described(quantization: Quantization | None, tensors: Iterable[str], folder: ModelFolder) -> None:
    """Raise ModelError when `tensors` (names) are quantized and nothing in the folder says how, or none is and
    something says so.
    """
    name = next((name for name in tensors if name.endswith(_MARKS)), None)
    if quantization is None and name is not None:
        raise ModelError(
            f"{folder.path} holds {name}, a quantized weight, but nothing says how it is quantized: config.json has no "
            f"{_KEYS[0]}, and there is neither {_FILES[0]} (GPTQ) nor {_FILES[1]} (AWQ). Copy the file that the "
            f"quantizing tool wrote into the folder."
        )
    if quantization is not None and quantization.values and quantization.of_weights and name is None:
        raise ModelError(
            f"{quantization.source} says that the weights in {folder.path} are quantized ({quantization.method}), but "
            f"none is. Fetch the quantized weights, or remove what says so."
        )


def _described(folder: ModelFolder) -> Quantization | None:
    config = folder.read_object("config.json")
    for key in _KEYS:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {key} must be an object, not {value!r}.")
        return Quantization(_method(value), f"config.json: {key}", value)
    for name in _FILES:
        if folder.has(name):
            value = folder.read_object(name)
            return Quantization(_method(value), name, value)
    return None


def _method(values: Mapping[str, object]) -> str:
    """Older tools do not name the method; AutoAWQ then has keys, and auto-gptq has others, of their own."""
    named = values.get("quant_method")
    if named is not None:
        return str(named).lower()
    if "w_bit" in values or ("zero_point" in values and "version" in values):
        return "awq"
    return "gptq" if "bits" in values and "group_size" in values else "unnamed"
