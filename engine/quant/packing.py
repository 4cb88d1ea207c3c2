"""Small integers out of 32-bit words, where they lie one after another from the lowest bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 32


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] → int32 [R * 32 / bits, C], every column unpacked downwards.

    Where `bits` does not divide 32, integers cross from one word into the next; R is then a multiple
    of the words after which they begin at a word's lowest bit (3 for 3 bits).
    """
    group = math.lcm(bits, _WORD) // _WORD  # words
    first = torch.arange(0, group * _WORD, bits, device=words.device)
    word, shift = first // _WORD, (first % _WORD)[:, None]
    mask = 2**bits - 1
    columns = words.shape[1]
    if group == 1:
        values: Tensor = (words[:, None] >> shift.int()) & mask
    else:
        groups = (words.long() & 0xFFFFFFFF).reshape(-1, group, columns)
        following = groups[:, (word + 1).clamp(max=group - 1)] << (_WORD - shift)
        values = (((groups[:, word] >> shift) | following) & mask).int()
    return values.reshape(-1, columns)


def words_of(part: range, bits: int) -> tuple[range, slice]:
    """The words that hold some integers of a row of them, and where they are among what `unpacked` answers for
    those words.
    """
    unit = math.lcm(bits, _WORD) // bits  # integers, after which they begin at a word's lowest bit
    first, last = part.start // unit * unit, -(-part.stop // unit) * unit
    return range(first * bits // _WORD, last * bits // _WORD), slice(part.start - first, part.stop - first)


def num_words(count: int, bits: int) -> int:
    """Words that `count` integers fill, the last one perhaps in part."""
    return -(-count * bits // _WORD)
