"""GPTQ: integers of 2, 3, 4 or 8 bits packed along the inputs, zero points and scales for groups of inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loading.quantization import Quantization
from engine.loading.store import ModelError
from engine.loading.weights import Weights
from engine.quant import LinearPart
from engine.quant.dequantized import Dequantized
from engine.quant.packing import num_words, unpacked, words_of
from engine.quant.variants import GPTQVariant, gptq_overrides, gptq_variant

_WORDS = ("I32",)
_SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class GPTQLayout:
    """W[n, k] = (q[k, n] - zero[g(k), n]) * scale[g(k), n].

    `group_size` -1 is one group. g(k) is `g_idx[k]`, arbitrary where inputs were quantized in another order
    than they stand ("act-order"); k // group_size in files without it. The first version of the format
    stores zero points less one, modulo 2**bits.
    """

    bits: int
    group_size: int
    zeros_less_one: bool
    mark: str = ".qweight"

    @property
    def name(self) -> str:
        return f"gptq {self.bits} bits"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        rows, columns, bits = part.rows, part.columns, self.bits
        if columns * bits % 32 or rows * bits % 32:
            raise ModelError(
                f"{part.name} is {rows} x {columns}; in GPTQ of {bits} bits both times the bits are multiples of 32."
            )
        size = columns if self.group_size == -1 else self.group_size
        num_groups = -(-columns // size)
        own_rows, own_columns = part.region
        group = self._groups(reader, part, size)
        least, most = int(group.min()), int(group.max())
        groups = range(max(0, least), min(most + 1, num_groups))
        words, column = words_of(own_columns, bits)
        zero_words, row = words_of(own_rows, bits)
        packed = reader.take_stored(f"{part.name}.qweight", (num_words(columns, bits), rows), _WORDS, (words, own_rows))
        packed_zeros = reader.take_stored(
            f"{part.name}.qzeros", (num_groups, num_words(rows, bits)), _WORDS, (groups, zero_words)
        )
        scales = reader.take_stored(f"{part.name}.scales", (num_groups, rows), _SCALES, (groups, own_rows)).float()
        if not 0 <= least <= most < num_groups:
            raise ModelError(f"{part.name}.g_idx names groups {least} to {most}; {part.name}.scales has {num_groups}.")
        zeros = unpacked(packed_zeros.t(), bits)[row].t()  # [groups, rows]
        if self.zeros_less_one:
            zeros = (zeros + 1) & (2**bits - 1)
        group = group - groups.start
        values = unpacked(packed, bits)[column]  # [columns, rows]
        return ((values - zeros[group]).float() * scales[group]).t().contiguous()

    def _groups(self, reader: Weights, part: LinearPart, size: int) -> Tensor:
        """The group of every input of the part: [columns]."""
        columns = part.region[1]
        name = f"{part.name}.g_idx"
        if not reader.has(name):
            return torch.arange(columns.start, columns.stop, device=reader.device) // size
        return reader.take_stored(name, (part.columns,), ("I32", "I64"), (columns,)).long()


@dataclass(frozen=True, slots=True)
class DynamicLayout:
    """Modules whose names match a pattern have a layout of their own, the first that fits; all others `layout`."""

    layout: GPTQLayout
    overrides: tuple[tuple[re.Pattern[str], GPTQLayout], ...]
    mark: str = ".qweight"

    @property
    def name(self) -> str:
        return ", ".join([self.layout.name, *(f"{pattern.pattern}: {own.name}" for pattern, own in self.overrides)])

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        fitting = (layout for pattern, layout in self.overrides if pattern.match(part.name))
        return next(fitting, self.layout).weight(reader, part)


def method(quantization: Quantization) -> Dequantized:
    """Raises ModelError for a variant that is not supported."""
    layout = _layout(gptq_variant(quantization))
    overrides = tuple((pattern, _layout(variant)) for pattern, variant in gptq_overrides(quantization))
    return Dequantized(DynamicLayout(layout, overrides) if overrides else layout)


def _layout(variant: GPTQVariant) -> GPTQLayout:
    return GPTQLayout(variant.bits, variant.group_size, zeros_less_one=variant.zeros_less_one)
