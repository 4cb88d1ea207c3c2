"""compressed-tensors: integers of 4 or 8 bits, packed or one to a byte, and FP8, in groups of modules.

Matrices keep their orientation [rows, columns]. Activations stay in the model's dtype: that the maker
meant them to be rounded to 8 bits as well (W8A8) is not followed, which costs speed and no quality.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loading.quantization import Quantization
from engine.loading.weights import Weights
from engine.quant import ExpertParts, LinearPart
from engine.quant.dequantized import Dequantized, in_blocks, num_blocks, scaled
from engine.quant.fp8 import SCALES
from engine.quant.fp8 import STORED as STORED_FP8
from engine.quant.packing import num_words, unpacked
from engine.quant.unquantized import UnquantizedExperts, UnquantizedWeight, plain, plain_experts
from engine.quant.variants import check_transforms

_STRATEGIES = ("tensor", "channel", "group", "block")
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")


@dataclass(frozen=True, slots=True)
class Scales:
    """What shares a scale: the matrix, a row, `size` columns of a row, or a block."""

    strategy: str
    group_size: int
    block: tuple[int, int] | None

    def block_of(self, part: LinearPart) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        if self.strategy == "tensor":
            return part.rows, part.columns
        if self.strategy == "channel":
            return 1, part.columns
        if self.strategy == "group":
            return 1, self.group_size
        assert self.block is not None
        return self.block

    def shape(self, part: LinearPart) -> tuple[int, ...]:
        """The shape of `weight_scale`."""
        return (1,) if self.strategy == "tensor" else num_blocks((part.rows, part.columns), self.block_of(part))


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """W = (u - z) * s; u unsigned, packed along columns, z along rows, 2**(bits - 1) when symmetric.

    With `weight_g_idx` the group of a column is what it says ("act-order").
    """

    bits: int
    symmetric: bool
    scales: Scales
    mark: str = ".weight_packed"

    @property
    def name(self) -> str:
        return f"{self.bits} bits, packed"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        shape, block = (part.rows, part.columns), self.scales.block_of(part)
        packed_shape = part.rows, num_words(part.columns, self.bits)
        packed = reader.take_stored(f"{part.name}.weight_packed", packed_shape, ("I32",))
        if reader.has(f"{part.name}.weight_shape"):
            reader.take_stored(f"{part.name}.weight_shape", (2,), ("I64", "I32"))
        values = unpacked(packed.t(), self.bits)[: part.columns].t()
        scales = reader.take_stored(f"{part.name}.weight_scale", self.scales.shape(part), SCALES).view(
            num_blocks(shape, block)
        )
        zeros = self._zeros(reader, part, scales)
        if reader.has(f"{part.name}.weight_g_idx"):
            group = reader.take_stored(f"{part.name}.weight_g_idx", (part.columns,), ("I32", "I64")).long()
            return scaled(values - zeros[:, group], scales.float()[:, group])
        return scaled(values - in_blocks(zeros, shape, block), in_blocks(scales, shape, block))

    def _zeros(self, reader: Weights, part: LinearPart, scales: Tensor) -> Tensor:
        """Zero points in the shape of the scales, float32."""
        if self.symmetric:
            return torch.full_like(scales, 2 ** (self.bits - 1), dtype=torch.float32)
        rows, groups = scales.shape
        stored = reader.take_stored(f"{part.name}.weight_zero_point", (num_words(rows, self.bits), groups), ("I32",))
        return unpacked(stored, self.bits)[:rows].float()


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """W = (weight - weight_zero_point) * weight_scale, an int8 or FP8 to an element; symmetric without zero points."""

    stored: tuple[str, ...]
    symmetric: bool
    scales: Scales
    mark: str = ".weight_scale"

    @property
    def name(self) -> str:
        return "fp8" if self.stored == STORED_FP8 else "int8"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        shape, block = (part.rows, part.columns), self.scales.block_of(part)
        values = reader.take_stored(f"{part.name}.weight", shape, self.stored).float()
        blocks = num_blocks(shape, block)
        scales = reader.take_stored(part.name + self.mark, self.scales.shape(part), SCALES).view(blocks)
        if not self.symmetric:
            zeros = reader.take_stored(f"{part.name}.weight_zero_point", self.scales.shape(part), ("I8",))
            values = values - in_blocks(zeros.view(blocks), shape, block)
        return scaled(values, in_blocks(scales, shape, block))


@dataclass(frozen=True, slots=True)
class Groups:
    """The LinearMethod of a config with several groups: (target, method), the first that fits a module is its own.

    A target is a module's name, a pattern after "re:", or the class "Linear", which is every module.
    """

    groups: tuple[tuple[str, Dequantized], ...]

    @property
    def name(self) -> str:
        return "compressed-tensors " + ", ".join(f"{target}: {method.name}" for target, method in self.groups)

    def load(self, reader: Weights, parts: Sequence[LinearPart]) -> UnquantizedWeight:
        return plain([self.weight(reader, part) for part in parts])

    def load_logits(self, reader: Weights, part: LinearPart) -> UnquantizedWeight:
        return self.load(reader, (part,))

    def load_experts(self, reader: Weights, experts: Sequence[ExpertParts]) -> UnquantizedExperts:
        return plain_experts(self.weight, reader, experts)

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""
        for target, method in self.groups:
            if _fits(target, part.name):
                return method.weight(reader, part)
        return reader.take(f"{part.name}.weight", (part.rows, part.columns))


def _fits(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name)


def method(quantization: Quantization) -> Groups:
    """Raises ModelError for a variant that is not supported."""
    check_transforms(quantization)
    default = quantization.text("format", "")
    described = quantization.inner("config_groups")
    groups = []
    for key in described.values:
        group = described.inner(key)
        targets = group.values.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise group.error("targets", "must be a list of names")
        made = Dequantized(_layout(group, group.text("format", default)))
        groups += [(target, made) for target in targets]
    return Groups(tuple(sorted(groups, key=lambda each: each[0] == "Linear")))


def _layout(group: Quantization, storage: str) -> PackedLayout | ByteLayout:
    if storage not in _FORMATS:
        raise group.error("format", f"is {storage!r} in effect, and must be one of {', '.join(_FORMATS)}")
    weights = group.inner("weights")
    bits, kind, symmetric = weights.integer("num_bits"), weights.text("type", "int"), weights.flag("symmetric", True)
    scales = _scales(weights)
    if storage == "pack-quantized" and kind == "int" and bits in (4, 8) and scales.strategy != "block":
        return PackedLayout(bits, symmetric, scales)
    if storage in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        return ByteLayout(("I8",), symmetric, scales)
    if storage in ("float-quantized", "naive-quantized") and (kind, bits, symmetric) == ("float", 8, True):
        return ByteLayout(STORED_FP8, True, scales)
    raise weights.error("num_bits", f"with the type {kind} and the format {storage} is not supported")


def _scales(weights: Quantization) -> Scales:
    strategy = weights.text("strategy", "tensor")
    group_size, block = weights.integer("group_size", -1), weights.sizes("block_structure")
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", f"must be one of {', '.join(_STRATEGIES)}")
    if strategy == "group" and group_size < 1:
        raise weights.error("group_size", "must be positive where the strategy is group")
    if strategy == "block" and block is None:
        raise weights.error("block_structure", "must be two sizes where the strategy is block")
    return Scales(strategy, group_size, block)
