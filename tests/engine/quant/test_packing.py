from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.quant.packing import num_words, unpacked
from tests.engine.quant.packers import stream


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unpacked_is_what_was_packed(bits: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, (5, 96))
    values[0] = 2**bits - 1  # all bits set: the sign of every word
    words = stream(values, bits).t()
    assert words.shape == (num_words(96, bits), 5)
    assert torch.equal(unpacked(words, bits), torch.from_numpy(values.T.astype(np.int32)))


def test_words_of_a_count_that_does_not_fill_them() -> None:
    assert [num_words(count, 4) for count in (1, 8, 9)] == [1, 1, 2]
    assert [num_words(count, 3) for count in (32, 64)] == [3, 6]
