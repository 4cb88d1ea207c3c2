"""compressed-tensors: integers of 4 or 8 bits, packed or one to a byte, and FP8, in groups of modules.

Matrices keep their orientation [rows, columns]. Activations stay in the model's dtype: that the maker
meant them to be rounded to 8 bits as well (W8A8) is not followed, which costs speed and no quality.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loading.quantization import Quantization
from engine.loading.weights import Weights
from engine.quant import LinearPart
from engine.quant.dequantized import Dequantized, blocks_of, in_blocks, num_blocks, scaled
from engine.quant.fp8 import SCALES
from engine.quant.fp8 import STORED as STORED_FP8
from engine.quant.packing import num_words, unpacked, words_of
from engine.quant.unquantized import PlainAtLoad
from engine.quant.variants import check_transforms, module_pattern

#: Begins a target that is a pattern.
_PATTERN = "re:"

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

    def take(
        self, reader: Weights, part: LinearPart, name: str, stored: tuple[str, ...], blocks: tuple[range, range]
    ) -> Tensor:
        """What the tensor `name` of a module has for the `blocks`: [rows of blocks, columns of blocks]."""
        full = f"{part.name}.{name}"
        if self.strategy == "tensor":
            return reader.take_stored(full, (1,), stored).view(1, 1)
        return reader.take_stored(full, num_blocks((part.rows, part.columns), self.block_of(part)), stored, blocks)


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
        region = rows, columns = part.region
        block = self.scales.block_of(part)
        words, own = words_of(columns, self.bits)
        packed = reader.take_stored(
            f"{part.name}.weight_packed", (part.rows, num_words(part.columns, self.bits)), ("I32",), (rows, words)
        )
        if reader.has(f"{part.name}.weight_shape"):
            reader.take_stored(f"{part.name}.weight_shape", (2,), ("I64", "I32"))
        values = unpacked(packed.t(), self.bits)[own].t()
        index_name = f"{part.name}.weight_g_idx"
        if not reader.has(index_name):
            blocks = blocks_of(region, block)
            scales = self.scales.take(reader, part, "weight_scale", SCALES, blocks)
            zeros = self._zeros(reader, part, scales, blocks)
            return scaled(values - in_blocks(zeros, region, block), in_blocks(scales, region, block))
        group = reader.take_stored(index_name, (part.columns,), ("I32", "I64"), (columns,)).long()
        blocks = blocks_of((rows, range(part.columns)), block)
        scales = self.scales.take(reader, part, "weight_scale", SCALES, blocks)
        zeros = self._zeros(reader, part, scales, blocks)
        return scaled(values - zeros[:, group], scales.float()[:, group])

    def _zeros(self, reader: Weights, part: LinearPart, scales: Tensor, blocks: tuple[range, range]) -> Tensor:
        """Zero points in the shape of the scales, float32."""
        if self.symmetric:
            return torch.full_like(scales, 2 ** (self.bits - 1), dtype=torch.float32)
        num_rows, num_groups = num_blocks((part.rows, part.columns), self.scales.block_of(part))
        words, own = words_of(blocks[0], self.bits)
        shape = num_words(num_rows, self.bits), num_groups
        stored = reader.take_stored(f"{part.name}.weight_zero_point", shape, ("I32",), (words, blocks[1]))
        return unpacked(stored, self.bits)[own].float()


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
        region, block = part.region, self.scales.block_of(part)
        blocks = blocks_of(region, block)
        values = reader.take_stored(f"{part.name}.weight", (part.rows, part.columns), self.stored, region).float()
        scales = self.scales.take(reader, part, "weight_scale", SCALES, blocks)
        if not self.symmetric:
            zeros = self.scales.take(reader, part, "weight_zero_point", ("I8",), blocks)
            values = values - in_blocks(zeros, region, block)
        return scaled(values, in_blocks(scales, region, block))


@dataclass(frozen=True, slots=True)
class Groups(PlainAtLoad):
    """The LinearMethod of a config with several groups: (target, method), the first that fits a module is its own.

    A target is a module's name, a pattern after "re:", or the class "Linear", which is every module.
    """

    groups: tuple[tuple[str, Dequantized], ...]

    @property
    def name(self) -> str:
        return "compressed-tensors " + ", ".join(f"{target}: {method.name}" for target, method in self.groups)

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""
        for target, method in self.groups:
            if _fits(target, part.name):
                return method.weight(reader, part)
        return reader.take(f"{part.name}.weight", (part.rows, part.columns), part.region)


def _fits(target: str, name: str) -> bool:
    if target.startswith(_PATTERN):
        return re.match(target.removeprefix(_PATTERN), name) is not None
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
        for target in targets:
            if target.startswith(_PATTERN):
                module_pattern(group, target.removeprefix(_PATTERN))
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
