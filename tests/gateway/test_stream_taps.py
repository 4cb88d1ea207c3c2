"""Choices whose text goes straight to the client: which tokens do, and what shuts the tap."""

from __future__ import annotations

import pytest

from gateway.rows import Gap
from gateway.stream import Delta
from protocol.messages import FinishReason, u32
from tests.gateway.choices import Halves, one, take
from tests.gateway.scripted_engine import EOS


class Glass:
    """A tap's other end: keeps what is put until it is full."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.is_full = False

    def put(self, json: bytes) -> bool:
        if not self.is_full:
            self.got.append(json)
        return not self.is_full


async def test_tokens_whose_text_is_all_there_is_to_tell_go_straight_to_an_open_tap() -> None:
    generation, choice, _ = one()
    glass = Glass()
    choice.push(0, u32([0]))
    await take(generation)
    choice.open_tap(glass)
    for index in range(1, 4):
        choice.push(index, u32([index]))
    choice.push(2, u32([9]))  # known
    assert glass.got == [b'"b"', b'"c"', b'"d"']
    assert not choice.in_mailbox
    assert list(choice.generated_ids) == [0, 1, 2, 3]
    choice.finish(FinishReason.LENGTH, None)
    assert await take(generation) == Delta(0, "", u32([]), 4, finish_reason=FinishReason.LENGTH)


async def test_an_end_behind_an_open_tap_tells_no_token_again() -> None:
    generation, choice, _ = one()
    choice.push(0, u32([0]))
    await take(generation)
    choice.open_tap(Glass())
    choice.push(1, u32([1]))
    choice.finish(FinishReason.LENGTH, None)
    assert await take(generation) == Delta(0, "", u32([]), 2, finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("ids", "text"),
    [([4, 5], "ef"), ([EOS], ""), ([4], "e")],
    ids=["two at once", "one that may be the last", "one for which the client reads too slowly"],
)
async def test_other_tokens_shut_the_tap_and_wait_to_be_read(ids: list[int], text: str) -> None:
    generation, choice, _ = one()
    glass = Glass()
    choice.push(0, u32([0]))
    await take(generation)
    choice.open_tap(glass)
    choice.push(1, u32([1]))
    glass.is_full = len(ids) == 1 and ids != [EOS]
    choice.push(2, u32(ids))
    glass.is_full = False
    delta = await take(generation)
    assert (delta.text, list(delta.ids), delta.num_generated) == (text, ids, 2 + len(ids))
    choice.push(2 + len(ids), u32([6]))  # it was not opened again
    assert (await take(generation)).text == "g"
    assert glass.got == [b'"b"']


async def test_a_gap_is_one_for_an_open_tap_too() -> None:
    generation, choice, _ = one()
    choice.push(0, u32([0]))
    await take(generation)
    choice.open_tap(Glass())
    with pytest.raises(Gap, match="token 2 came where 1 was next"):
        choice.push(2, u32([1]))


async def test_no_tap_is_open_where_a_text_may_be_held_back() -> None:
    for fields in ({"stop": ("xyz",)}, {"decoder": Halves}):
        generation, choice, _ = one(**fields)
        glass = Glass()
        choice.push(0, u32([1, 1]))
        await take(generation)
        choice.open_tap(glass)
        choice.push(2, u32([2]))
        assert (choice.in_mailbox, glass.got) == (True, [])
