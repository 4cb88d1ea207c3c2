"""The per-choice state machine and the mailbox, without any wire."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import EngineFailed
from gateway.generation import Generation
from gateway.rows import Gap
from gateway.stream import Delta
from protocol.messages import AbortReason, FinishReason, Logprobs, f32, u32
from tests.gateway.choices import Carrier, Halves, one, sampling, take
from tests.gateway.scripted_engine import EOS, request


async def test_tokens_become_text_and_the_end_is_told_once() -> None:
    generation, choice, carrier = one()
    choice.admit(16)
    choice.push(0, u32([7]))
    assert await take(generation) == Delta(0, "h", u32([7]), 1)
    choice.push(1, u32([8, 9]))
    choice.finish(FinishReason.LENGTH, None)
    last = await take(generation)
    assert (last.text, list(last.ids), last.num_generated) == ("ij", [8, 9], 3)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)
    assert await generation.next() is None
    assert choice.cached_tokens == 16
    assert carrier.left == []


async def test_a_slow_reader_gets_one_delta_for_many_tokens() -> None:
    generation, choice, _ = one()
    for index in range(50):
        choice.push(index, u32([index]))
    delta = await take(generation)
    assert list(delta.ids) == list(range(50))
    assert len(delta.text) == 50
    choice.push(50, u32([0]))
    assert (await take(generation)).text == "a"


async def test_repeats_are_dropped_and_a_gap_is_refused() -> None:
    generation, choice, _ = one()
    choice.push(0, u32([3, 4]))
    choice.push(0, u32([3, 4]))
    choice.push(1, u32([4, 5, 6]))
    assert list((await take(generation)).ids) == [3, 4, 5, 6]
    with pytest.raises(Gap, match="token 5 came where 4 was next"):
        choice.push(5, u32([7]))
    choice.push(2, u32([5]))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(generation.next(), 0.01)


async def test_a_stop_string_ends_it_when_the_token_arrives_and_counts_to_it() -> None:
    generation, choice, carrier = one(stop=("cde",))
    choice.push(0, u32([0, 1, 2, 3, 4, 5, 6]))
    assert carrier.left == [AbortReason.STOP_STRING]
    choice.push(7, u32([7]))
    choice.finish(FinishReason.LENGTH, None)
    delta = await take(generation)
    assert delta.text == "ab"
    assert list(delta.ids) == [0, 1, 2, 3, 4]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "cde")
    assert len(choice.generated_ids) == 5
    assert await generation.next() is None


async def test_a_possible_stop_string_is_held_back_and_given_out_at_the_end() -> None:
    generation, choice, _ = one(stop=("cdx",))
    choice.push(0, u32([1, 2, 3]))
    assert (await take(generation)).text == "b"
    choice.finish(FinishReason.LENGTH, None)
    last = await take(generation)
    assert (last.text, last.finish_reason) == ("cd", FinishReason.LENGTH)


async def test_text_stops_wait_for_min_tokens() -> None:
    generation, choice, _ = one(stop=("b",), sampling=sampling(min_tokens=4))
    choice.push(0, u32([0, 1, 0, 0]))
    assert not choice.ended
    choice.push(4, u32([0, 1]))
    delta = await take(generation)
    assert delta.text == "abaaa"
    assert (len(delta.ids), delta.stop_reason) == (6, "b")


def prompt_rows(*own: float, k: int = 1) -> Logprobs:
    n = len(own)
    return Logprobs(k, f32(own), u32([1] * n), u32([7] * n * k), f32([-9.0] * n * k))


async def test_prompt_logprobs_are_collected_once_each_and_before_the_tokens() -> None:
    generation, choice, _ = one(prompts=(u32([1, 2, 3, 4, 5]),), sampling=sampling(prompt_logprobs=1))
    assert choice.next_scored == 1
    choice.push_prompt(1, prompt_rows(-1, -2))
    choice.push_prompt(2, prompt_rows(-2, -3, k=3))  # known ones again, from another life, and wider
    assert choice.next_scored == 4
    assert choice.num_received == 3
    with pytest.raises(Gap, match="a token came where the prompt's logprobs at 4 were next"):
        choice.push(0, u32([0]))
    choice.push_prompt(4, prompt_rows(-4))
    assert choice.next_scored == -1
    choice.push(0, u32([0]))
    assert choice.prompt_logprobs == prompt_rows(-1, -2, -3, -4)
    assert choice.num_received == 5
    assert (await take(generation)).text == "a"


@pytest.mark.parametrize(
    ("first", "rows", "words"),
    [
        (2, prompt_rows(-1, k=2), "at 2 came where 1 was next"),
        (1, prompt_rows(-1, k=1), "1 wide, were not asked"),
        (1, prompt_rows(-1, -2, -3, k=2), "3 logprobs of the prompt from 1 on"),
    ],
)
async def test_prompt_logprobs_that_skip_or_are_others_are_a_gap(first: int, rows: Logprobs, words: str) -> None:
    _, choice, _ = one(prompts=(u32([1, 2, 3]),), sampling=sampling(prompt_logprobs=2))
    with pytest.raises(Gap, match=words):
        choice.push_prompt(first, rows)


async def test_a_choice_that_only_scores_is_not_complete_before_its_last_row() -> None:
    generation, choice, _ = one(prompts=(u32([1, 2, 3]),), sampling=sampling(max_tokens=0, prompt_logprobs=0))
    assert choice.verdict() is None
    choice.push_prompt(1, prompt_rows(-1, -2))
    assert choice.verdict() == (FinishReason.LENGTH, None)
    choice.finish(FinishReason.LENGTH, None)
    assert (await take(generation)).finish_reason is FinishReason.LENGTH


async def test_a_stop_token_is_counted_but_not_shown() -> None:
    generation, choice, _ = one(sampling=sampling(stop_token_ids=(9,)))
    choice.push(0, u32([0, 9]))
    choice.finish(FinishReason.STOP, 9)
    delta = await take(generation)
    assert (delta.text, list(delta.ids)) == ("a", [0, 9])
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, 9)


async def test_end_of_sequence_has_no_stop_reason() -> None:
    generation, choice, _ = one()
    choice.push(0, u32([0, EOS]))
    choice.finish(FinishReason.STOP, EOS)
    delta = await take(generation)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, None)


async def test_with_include_stop_the_stop_token_is_shown() -> None:
    generation, choice, _ = one(include_stop=True, sampling=sampling(stop_token_ids=(9,)))
    choice.push(0, u32([0, 9]))
    choice.finish(FinishReason.STOP, 9)
    assert (await take(generation)).text == "aj"


async def test_with_ignore_eos_it_is_a_token_like_others() -> None:
    generation, choice, _ = one(sampling=sampling(ignore_eos=True))
    choice.push(0, u32([0, EOS]))
    assert (await take(generation)).text == "ag"
    assert choice.verdict() is None


@pytest.mark.parametrize(
    ("fields", "ids", "verdict"),
    [
        ({}, [0, 1], None),
        ({}, [0, EOS], (FinishReason.STOP, EOS)),
        ({"ignore_eos": True}, [0, EOS], None),
        ({"stop_token_ids": (5,)}, [0, 5], (FinishReason.STOP, 5)),
        ({"min_tokens": 2}, [0, EOS], None),
        ({"max_tokens": 2}, [0, 1], (FinishReason.LENGTH, None)),
        ({"max_tokens": 2}, [0, EOS], (FinishReason.STOP, EOS)),
        ({"max_tokens": 0}, [], (FinishReason.LENGTH, None)),
    ],
)
async def test_verdict_is_the_engines(fields: dict[str, object], ids: list[int], verdict: object) -> None:
    _, choice, _ = one(sampling=sampling(**fields))
    choice.push(0, u32(ids))
    assert choice.verdict() == verdict


async def test_half_a_character_is_never_sent() -> None:
    generation, choice, _ = one(decoder=Halves)
    choice.push(0, u32([0, 0, 1]))
    assert (await take(generation)).text == "a"
    choice.push(3, u32([1]))
    assert (await take(generation)).text == "b"
    choice.push(4, u32([3]))
    choice.finish(FinishReason.LENGTH, None)
    assert (await take(generation)).text == "\ufffd"


async def test_a_stop_string_that_completes_in_the_last_text_wins() -> None:
    generation, choice, _ = one(decoder=Halves, stop=("a\ufffd",))
    choice.push(0, u32([0, 0, 1]))
    choice.finish(FinishReason.LENGTH, None)
    delta = await take(generation)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, "a\ufffd")


async def test_logprobs_are_cut_to_what_the_choice_asked_and_merged() -> None:
    generation, choice, _ = one(sampling=sampling(logprobs=1))
    for index in range(2):
        choice.push(
            index, u32([index]), Logprobs(2, f32([-0.5 - index]), u32([1]), u32([index, 9]), f32([-0.25, -4.0]))
        )
    rows = (await take(generation)).logprobs
    assert rows == Logprobs(1, f32([-0.5, -1.5]), u32([1, 1]), u32([0, 1]), f32([-0.25, -0.25]))


async def test_of_a_frame_a_choice_takes_its_own_tokens_and_rows() -> None:
    rows = Logprobs(1, f32([-1, -2, -3, -4]), u32([1, 2, 3, 4]), u32([9, 8, 7, 6]), f32([-5, -6, -7, -8]))
    frame = u32([0, 1, 2, 3])
    generation, choice, _ = one(sampling=sampling(logprobs=1))
    choice.push(0, frame, rows, 1, 3)
    own = Logprobs(1, f32([-2, -3]), u32([2, 3]), u32([8, 7]), f32([-6, -7]))
    assert await take(generation) == Delta(0, "bc", u32([1, 2]), 2, own)
    choice.push(1, frame, rows, 2, 4)  # the first of them is known
    own = Logprobs(1, f32([-4]), u32([4]), u32([6]), f32([-8]))
    assert await take(generation) == Delta(0, "d", u32([3]), 3, own)
    generation, choice, _ = one()  # which did not ask
    choice.push(0, frame, rows, 0, 1)
    assert await take(generation) == Delta(0, "a", u32([0]), 1)


async def test_logprobs_zero_is_the_chosen_tokens_alone() -> None:
    generation, choice, _ = one(sampling=sampling(logprobs=0))
    choice.push(0, u32([4]), Logprobs(1, f32([-0.5]), u32([3]), u32([7]), f32([-0.25])))
    assert (await take(generation)).logprobs == Logprobs(0, f32([-0.5]), u32([3]), u32([]), f32([]))


async def test_logprobs_that_do_not_come_fail_the_link() -> None:
    _, choice, _ = one(sampling=sampling(logprobs=2))
    with pytest.raises(Gap, match="without the logprobs"):
        choice.push(0, u32([4]))
    _, choice, _ = one(sampling=sampling(logprobs=2))
    with pytest.raises(Gap, match="1 alternatives where 2"):
        choice.push(0, u32([4]), Logprobs(1, f32([-0.5]), u32([3]), u32([7]), f32([-0.25])))


async def test_an_error_comes_after_what_came_before_and_ends_the_others() -> None:
    generation, first, carrier = one(n=2)
    other = Carrier()
    generation.choices[1].carried_by(other)
    first.push(0, u32([0]))
    first.fail(EngineFailed("broken"))
    assert (await take(generation)).text == "a"
    with pytest.raises(EngineFailed, match="broken"):
        await generation.next()
    assert carrier.left == []
    assert other.left == [AbortReason.CLIENT]
    first.push(1, u32([0]))
    assert list(first.generated_ids) == [0]


async def test_abort_tells_each_unfinished_choice_once() -> None:
    generation, first, carrier = one(n=2)
    other = Carrier()
    generation.choices[1].carried_by(other)
    first.finish(FinishReason.LENGTH, None)
    generation.abort()
    generation.abort()
    assert carrier.left == []
    assert other.left == [AbortReason.CLIENT]


async def test_unstreamed_choices_give_one_delta_each_in_order_of_their_end() -> None:
    generation, first, _ = one(n=2, stream=False)
    second = generation.choices[1]
    first.push(0, u32([0]))
    second.push(0, u32([1]))
    second.push(1, u32([2]))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(generation.next(), 0.01)
    second.finish(FinishReason.LENGTH, None)
    first.finish(FinishReason.LENGTH, None)
    assert [(delta.index, delta.text) async for delta in generation] == [(1, "bc"), (0, "a")]


async def test_next_is_safe_to_cancel() -> None:
    generation, choice, _ = one()
    reading = asyncio.create_task(generation.next())
    await asyncio.sleep(0)
    choice.push(0, u32([0]))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert (await take(generation)).text == "a"


async def test_choices_are_prompt_major() -> None:
    generation = Generation(request([1], [2, 3], n=2), ())
    assert [list(choice.prompt_ids) for choice in generation.choices] == [[1], [1], [2, 3], [2, 3]]


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    stops=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3).map(tuple),
    min_tokens=st.integers(0, 10),
    data=st.data(),
)
async def test_how_tokens_come_and_are_read_changes_nothing(
    ids: list[int], stops: tuple[str, ...], min_tokens: int, data: st.DataObject
) -> None:
    """Against the rule itself: the text up to the first stop string that is complete late enough."""
    whole = "".join(chr(ord("a") + token) for token in ids)
    ends = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(whole) + 1)
        if end > min_tokens and whole[end - len(stop) : end] == stop
    ]
    num_tokens, length, matched = min(ends, default=(len(ids), len(whole), None))

    generation, choice, _ = one(stop=stops, sampling=sampling(min_tokens=min_tokens))
    got: list[Delta] = []
    sent = 0
    while sent < len(ids):
        again = data.draw(st.integers(0, sent), "first index, known ones again")
        sent = data.draw(st.integers(sent + 1, len(ids)), "end")
        choice.push(again, u32(ids[again:sent]))
        if data.draw(st.booleans(), "reads") and choice.in_mailbox:
            got.append(await take(generation))
    choice.finish(FinishReason.LENGTH, None)
    got += [delta async for delta in generation]
    assert "".join(delta.text for delta in got) == whole[:length]
    assert [token for delta in got for token in delta.ids] == ids[:num_tokens]
    assert got[-1].stop_reason == matched
    assert got[-1].finish_reason is (FinishReason.LENGTH if matched is None else FinishReason.STOP)
    assert [delta.finish_reason for delta in got[:-1]] == [None] * (len(got) - 1)
