from __future__ import annotations

import random
from collections import Counter

from loadtest.compare import Answer, Choice
from loadtest.matrix import AXES, CHAT, DERIVED, cases


def answer(text: str, ids: tuple[int, ...]) -> Answer:
    return Answer({0: Choice(text, "", ids, None, (), "length", None)}, None, None)


def test_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert cases(1, 20) == cases(1, 20)
    assert cases(1, 20) != cases(2, 20)


def test_every_option_comes_equally_often() -> None:
    made = cases(3, 60)
    for axis, options in AXES.items():
        counts = Counter(case.options[axis] for case in made)
        assert set(counts) == set(options)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert Counter(case.options["derived"] for case in made) == dict.fromkeys(DERIVED, 10)
    assert Counter(case.streamed for case in made) == {True: 40, False: 20}
    assert Counter(case.path for case in made)[CHAT] == 15


def test_bodies_are_of_their_route() -> None:
    made = cases(4, 40)
    assert any(case.body.get("echo") and "logprobs" in case.body for case in made)
    for case in made:
        if case.path == CHAT:
            assert "messages" in case.body
            assert case.body.get("logprobs", True) is True
        else:
            assert "prompt" in case.body
            assert case.body["echo"] in (True, False)
        assert ("stream_options" in case.body) is case.streamed


def test_derived_values_come_from_the_answer() -> None:
    given, ids = answer("abcdefghijkl", (5, 6, 7, 8)), {5, 6, 7, 8}
    seen = set()
    for case in cases(5, 12):
        body = case.derived(given, random.Random(0)).body
        option = case.options["derived"]
        seen.add(option)
        match option:
            case "none":
                assert body == case.body
            case "stop string" | "stop string kept":
                (stop,) = body["stop"]
                assert stop in "ghijkl"
                assert body["include_stop_str_in_output"] is option.endswith("kept")
            case "stop id":
                assert set(body["stop_token_ids"]) <= {7, 8}
            case "logit_bias":
                assert set(map(int, body["logit_bias"])) <= ids
            case "allowed ids":
                assert body["allowed_token_ids"] == [5, 6, 7, 8]
    assert seen == set(DERIVED)


def test_of_an_answer_that_is_too_short_nothing_is_derived() -> None:
    for case in cases(6, 12):
        assert case.derived(answer("", ()), random.Random(0)).body == case.body
