from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopMatcher

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3, unique=True).map(tuple)


def play(stops: tuple[str, ...], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each piece (and at the end), and the stop string that ended it."""
    matcher = StopMatcher(stops, include_stop)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.finish()], None


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """By definition: the match with the smallest end, of those the one that begins first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=6), include_stop=st.booleans())
def test_any_split_gives_what_the_whole_text_gives(
    stops: tuple[str, ...], pieces: list[str], include_stop: bool
) -> None:
    text = "".join(pieces)
    shown, matched = play(stops, pieces, include_stop=include_stop)
    match = first_match(text, stops)
    if match is None:
        assert matched is None
        assert "".join(shown) == text
    else:
        end, stop = match
        assert matched == stop
        assert "".join(shown) == text[: end if include_stop else end - len(stop)]


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=6))
def test_only_a_possible_beginning_of_a_stop_is_held_back(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    text = shown = ""
    for piece in pieces:
        more, matched = matcher.push(piece)
        if matched is not None:
            return
        text += piece
        shown += more
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        longer = [text[i:] for i in range(len(shown))]
        assert not any(stop.startswith(suffix) and stop != suffix for suffix in longer for stop in stops)


def test_strings_that_almost_match_cost_no_more_than_others() -> None:
    almost = tuple("a" * length + "b" for length in range(1008, 1024))

    def seconds(pieces: list[str]) -> float:
        matcher = StopMatcher(almost, include_stop=False)
        for _ in range(300):
            matcher.push("aaaa")
        began = time.process_time()
        for piece in pieces:
            matcher.push(piece)
        return time.process_time() - began

    seconds(["aaaa"])  # the tables are made
    assert seconds(["aaac", "aaca", "aaaa"] * 100) < 20 * seconds(["cccc"] * 300) + 0.1


def test_without_stops_everything_passes_at_once() -> None:
    assert play((), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_of_two_matches_that_end_together_the_longer_one_counts() -> None:
    assert play(("b", "ab"), ["cab"]) == (["c"], "ab")
    assert play(("ab", "b"), ["cab"]) == (["c"], "ab")


def test_a_match_complete_while_not_armed_does_not_count_later() -> None:
    matcher = StopMatcher(("abc", "xabcy"), include_stop=False)
    assert matcher.push("xabc", armed=False) == ("", None)
    assert matcher.push("z") == ("xabcz", None)


def test_a_match_that_began_while_not_armed_counts_when_it_is_complete() -> None:
    matcher = StopMatcher(("aa",), include_stop=False)
    assert matcher.push("aa", armed=False) == ("a", None)
    assert matcher.push("a") == ("", "aa")
