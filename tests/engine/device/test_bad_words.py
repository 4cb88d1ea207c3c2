"""Bad words: what may not come next, as ids come."""

from __future__ import annotations

import pytest
import torch

from engine.device.bad_words import BadWords
from engine.device.gpu_bad_words import GpuBadWords
from protocol.messages import u32


@pytest.mark.parametrize(
    ("words", "generated", "barred"),
    [
        ([(5,)], [], {5}),
        ([(5, 6)], [], set()),
        ([(5, 6)], [5], {6}),
        ([(5, 6), (9,)], [6, 5], {6, 9}),
        ([(5, 6, 7)], [6], set()),
        ([(5, 6, 7), (6, 8)], [5, 6], {7, 8}),
        ([(5, 5, 5)], [5, 5, 5], {5}),
        ([(5, 6), (4, 6)], [4], {6}),
    ],
)
def test_the_last_id_of_a_word_is_barred_where_the_others_stand(
    words: list[tuple[int, ...]], generated: list[int], barred: set[int]
) -> None:
    assert set(BadWords(words, u32(generated)).barred.tolist()) == barred
    one_by_one = BadWords(words, u32())
    for token in generated:
        one_by_one.add(token)
    assert set(one_by_one.barred.tolist()) == barred


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_gpus_tensors_bar_the_same_ids(known: int) -> None:
    words = ((5,), (5, 6), (5, 6, 7), (6, 8), (4, 6), (9,) * 64)
    generated = [4, 5, 6, 7, 5, 5, 6, *[9] * 63, 6]
    tensors, expected = GpuBadWords(3, torch.device("cpu")), BadWords(words, u32(generated[:known]))
    tensors.enter(1, ((0,),), u32([1, 2, 3]))
    tensors.enter(1, words, u32(generated[:known]))
    for token in generated[known:]:
        logits = torch.arange(12.0)
        tensors.bar(logits, 1)
        barred = (logits == -torch.inf).nonzero().flatten().tolist()
        assert set(barred) == set(expected.barred.tolist())
        tensors.add(1, torch.tensor(token, dtype=torch.int32))
        expected.add(token)
