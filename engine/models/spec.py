"""What a decoder is built from: the numbers of a model, the names of its weights.

`ConfigFields` reads config.json as both generations of transformers write it. The decoder
(`engine.models.decoder`) sees a ModelSpec only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.loading.store import ModelError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with rotary positions, RMS norms and a gated MLP.

    `dtype` is the checkpoint's own ("float32", "bfloat16", "float16"), None when config.json does
    not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: str | None


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a checkpoint calls the modules of a decoder; those of a layer follow its `layer` prefix."""

    embedding: str
    layer: str  # with one {} for the layer's number
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str


@dataclass(frozen=True, slots=True)
class Family:
    """`spec` reads a config; `ignored` are endings of tensor names that old checkpoints carry in vain."""

    spec: Callable[[ConfigFields], ModelSpec]
    names: WeightNames
    ignored: tuple[str, ...] = ()


class ConfigFields:
    """Typed access to config.json. Every error names the field, the value and what is expected."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` when the field is absent or null."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; `default` when the field is absent or null."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {name} must be a positive number, not {value!r}.")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {value!r}.")
        return value

    def expect(self, name: str, supported: object) -> None:
        """Refuse a field whose value, when given, is another than the supported one."""
        value = self._value(name, supported)
        if value != supported:
            raise ModelError(f"config.json: {name} is {value!r}; supported is {supported!r}.")

    def dtype(self) -> str | None:
        """`dtype`, else `torch_dtype` (the older key), null meaning absent."""
        for name in ("dtype", "torch_dtype"):
            value = self._values.get(name)
            if value is None:
                continue
            if value not in ("float32", "bfloat16", "float16"):
                raise ModelError(f"config.json: {name} is {value!r}; supported are float32, bfloat16, float16.")
            return str(value)
        return None

    def plain_rope_theta(self) -> float:
        """The base of unscaled rotary positions, from `rope_parameters` or the older pair of keys."""
        parameters = self._rope("rope_parameters")
        for name, rope in (("rope_parameters", parameters), ("rope_scaling", self._rope("rope_scaling"))):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise ModelError(f"config.json: {name} has the type {kind!r}; supported is 'default' (no scaling).")
        if "rope_theta" in parameters:
            return ConfigFields(parameters).number("rope_theta")
        return self.number("rope_theta", 10000.0)

    def _rope(self, name: str) -> Mapping[str, object]:
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {name} must be an object or null, not {value!r}.")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json has no {name}, which this architecture needs.")
        return value
