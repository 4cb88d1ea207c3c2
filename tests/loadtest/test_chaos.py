from __future__ import annotations

from loadtest.asking import Asked
from loadtest.chaos import Blow, ChaosConfig, Reference, Report, Struck, _found, table
from loadtest.compare import Answer, Choice
from loadtest.matrix import Case

CONFIG = ChaosConfig((), (), 1, 0, 1, 15.0, 1, 1, 0)


def answer(text: str) -> Answer:
    return Answer({0: Choice(text, "", None, None, (), "length", None)}, {"completion_tokens": 3}, None)


def asked(given: Answer | None, failure: str = "") -> Asked:
    return Asked(given, failure, 200, 0.0, 1.0, 0.5)


def test_what_differs_is_found_and_a_failure_is_a_difference() -> None:
    reference = Reference(Case("/", {}, {"n": "2", "filter": "none"}), answer("abc"))
    assert reference.num_tokens == 3
    assert _found([reference], [asked(answer("abc"))]) == []
    assert _found([reference], [asked(answer("abd"))]) == ["n 2: choice 0: text: expected 'abc', got 'abd'"]
    assert _found([reference], [asked(None, "status 503: gone")]) == ["n 2: status 503: gone"]


def struck(blow: Blow, *, freed_s: float | None = None, found: list[str] | None = None) -> Struck:
    return Struck(blow, 4, 9, ["a", "b"], 3, 0.75, freed_s, found or [])


def test_the_table_counts_blows_and_lists_what_was_found() -> None:
    blows = [
        struck(Blow.ENGINE_KILL),
        struck(Blow.ENGINE_KILL, found=["n 2: text"]),
        struck(Blow.GATEWAY_KILL, freed_s=0.2),
    ]
    report = Report(1, [], {}, {}, {}, CONFIG, 1, {"n": {"1": 2, "2": 2}}, 0, blows)
    assert report.num_different == 1
    lines = table(report).splitlines()
    assert "| engine killed | 2 | 4 | 6 | 1 | 0.75, 0.75 |" in lines
    assert "| gateway killed | 1 | lost with it | 3 | 0 | 0.20, 0.20 until its blocks were free |" in lines
    assert "n: 1 2, 2 2" in lines
    assert lines[-1] == "- engine killed at token 4: n 2: text"
