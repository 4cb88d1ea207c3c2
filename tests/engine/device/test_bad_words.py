"""Bad words: what may not come next, as ids come."""

from __future__ import annotations

import pytest

from engine.device.bad_words import BadWords
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
