"""FP8 (e4m3) weights with scales for blocks or for the whole matrix, or made while plain weights are loaded.

Activations stay in the model's dtype: a checkpoint's activation scales are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loading.quantization import Quantization
from engine.loading.weights import Weights
from engine.quant import LinearMethod, LinearPart
from engine.quant.dequantized import Dequantized, blocks_of, in_blocks, num_blocks, scaled
from engine.quant.unquantized import PlainAtLoad, Unquantized, UnquantizedWeight

FP8 = torch.float8_e4m3fn
STORED = ("F8_E4M3",)
SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """W = weight * weight_scale_inv, one factor for a block [rows, columns], as DeepSeek's checkpoints have it."""

    block: tuple[int, int]
    mark: str = ".weight_scale_inv"

    @property
    def name(self) -> str:
        return f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        shape, region = (part.rows, part.columns), part.region
        values = reader.take_stored(f"{part.name}.weight", shape, STORED, region)
        blocks = num_blocks(shape, self.block)
        scales = reader.take_stored(part.name + self.mark, blocks, SCALES, blocks_of(region, self.block))
        return scaled(values, in_blocks(scales, region, self.block))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """W = weight * weight_scale, one factor for the matrix."""

    mark: str = ".weight_scale"

    @property
    def name(self) -> str:
        return "fp8 by matrix"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        values = reader.take_stored(f"{part.name}.weight", (part.rows, part.columns), STORED, part.region)
        return scaled(values, reader.take_stored(part.name + self.mark, (), SCALES).float())


@dataclass(frozen=True, slots=True)
class Online(PlainAtLoad):
    """Plain weights rounded to FP8 as they are loaded, with a scale for each row."""

    @property
    def name(self) -> str:
        return "fp8 by row, made at load, dequantized"

    def load_logits(self, reader: Weights, part: LinearPart) -> UnquantizedWeight:
        """Left plain, as vLLM does: errors of logits weigh most, and what makes them is a small part of a model."""
        return Unquantized().load_logits(reader, part)

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """One part in the dtype in force: [rows, columns]."""
        rows, columns = part.region
        whole_rows = reader.take(f"{part.name}.weight", (part.rows, part.columns), (rows, range(part.columns)))
        rounded = _rounded(whole_rows.float())[:, columns.start : columns.stop]
        return rounded.to(reader.dtype).contiguous()


def _rounded(weight: Tensor) -> Tensor:
    """float32 [rows, columns] to the nearest FP8 values, each row's largest at the largest FP8."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(FP8).max, 1.0)
    return (weight / scale).to(FP8).float() * scale


def method(quantization: Quantization) -> LinearMethod:
    """Raises ModelError for a variant that is not supported. A description without fields asks for `Online`."""
    if not quantization.values:
        return Online()
    if quantization.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise quantization.error("fmt", "must be e4m3")
    block = quantization.sizes("weight_block_size")
    return Dequantized(TensorLayout() if block is None else BlockLayout(block))
