"""AWQ in the layout "gemm": 4-bit integers packed along the outputs in an interleaved order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.loading.quantization import Quantization
from engine.loading.store import ModelError
from engine.loading.weights import Weights
from engine.quant import LinearPart
from engine.quant.dequantized import Dequantized, blocks_of, in_blocks, scaled
from engine.quant.packing import unpacked, words_of
from engine.quant.variants import AWQ_BITS, awq_variant

_PER_WORD = 8

#: Column c of eight is in the nibble _NIBBLE[c] of their word, counted from the lowest.
_NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]

_WORDS = ("I32",)
_SCALES = ("F16", "BF16", "F32")  # float16 from AutoAWQ, bfloat16 from gptqmodel


@dataclass(frozen=True, slots=True)
class AWQLayout:
    """W[n, k] = (q[k, n] - zero[k // group_size, n]) * scale[k // group_size, n]; `group_size` -1 is one group."""

    group_size: int
    mark: str = ".qweight"

    @property
    def name(self) -> str:
        return "awq 4 bits"

    def weight(self, reader: Weights, part: LinearPart) -> Tensor:
        """float32 [rows, columns]."""
        rows, columns = part.rows, part.columns
        size = columns if self.group_size == -1 else self.group_size
        if rows % _PER_WORD or columns % size:
            raise ModelError(
                f"{part.name} is {rows} x {columns}; in AWQ the first is a multiple of {_PER_WORD} and the second of "
                f"the group size, {size}."
            )
        num_words, num_groups, region, block = rows // _PER_WORD, columns // size, part.region, (1, size)
        words, own = words_of(region[0], AWQ_BITS)
        groups = blocks_of(region, block)[1]
        packed = reader.take_stored(f"{part.name}.qweight", (columns, num_words), _WORDS, (region[1], words))
        packed_zeros = reader.take_stored(f"{part.name}.qzeros", (num_groups, num_words), _WORDS, (groups, words))
        scales = reader.take_stored(f"{part.name}.scales", (num_groups, rows), _SCALES, (groups, region[0])).t()
        zeros = in_blocks(_columns(packed_zeros)[own], region, block)
        return scaled(_columns(packed)[own] - zeros, in_blocks(scales, region, block))


def _columns(words: Tensor) -> Tensor:
    """Packed [R, C / 8] → int32 [C, R]: one row for every column of the matrix that was packed."""
    num_rows, num_words = words.shape
    nibbles = unpacked(words.t(), AWQ_BITS).view(num_words, _PER_WORD, num_rows)
    return nibbles[:, _NIBBLE].view(num_words * _PER_WORD, num_rows)


def method(quantization: Quantization) -> Dequantized:
    """Raises ModelError for a variant that is not supported."""
    return Dequantized(AWQLayout(awq_variant(quantization).group_size))
