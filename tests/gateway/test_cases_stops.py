"""Cases B (and D6): stop strings that other servers sent, missed, or could not take."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway
from tests.gateway.test_answering import events_of


async def answers(text: str, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """The texts of the stream's events, and the choice of the same request without stream."""
    gateway = StubGateway(vocabularies.characters())
    ids = gateway.sampled(text)
    gateway.dispatcher.script = lambda _request, _index: ids
    gateway.dispatcher.paced = True
    body = {"prompt": "x", "max_tokens": 100} | fields
    async with gateway.client() as client:
        whole = await client.post("/v1/completions", json=body)
        assert whole.status_code == 200, whole.text
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
    (choice,) = whole.json()["choices"]
    *events, finish, done = events_of(streamed.text)
    assert done == "[DONE]"
    assert finish["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert finish["choices"][0]["stop_reason"] == choice["stop_reason"]
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == choice["text"]
    return pieces, choice


async def test_b1_nothing_of_a_stop_string_is_sent() -> None:
    pieces, choice = await answers("ABCDEFGHIJKLM", stop="DEFGHIJ")
    assert pieces == ["A", "B", "C"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "DEFGHIJ")


async def test_b2_a_stop_string_of_several_tokens_is_found() -> None:
    _, choice = await answers(" L M N O P Q R S", stop=" O P Q")
    assert (choice["text"], choice["finish_reason"]) == (" L M N", "stop")


async def test_b3_newlines_that_lead_to_no_stop_are_kept() -> None:
    text = "one\ntwo\n\nthree\nnev\n"
    _, choice = await answers(text, stop="\nnever")
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [["k=1 was", "1"], ["1", "k=1 was"]])
async def test_b4_the_match_that_is_complete_first_wins(stop: list[str]) -> None:
    _, choice = await answers("if k=1 is so", stop=stop)
    assert (choice["text"], choice["stop_reason"]) == ("if k=", "1")


@pytest.mark.parametrize("num_stops", [4, 5, 16])
async def test_b5_up_to_16_stop_strings_are_taken(num_stops: int) -> None:
    stops = [f"never{i}" for i in range(num_stops - 1)] + ["lo"]
    _, choice = await answers("hello", stop=stops)
    assert choice["text"] == "hel"


async def test_b5_more_are_refused_by_name() -> None:
    async with StubGateway(vocabularies.characters()).client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stop": ["a"] * 17})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"
    assert "at most 16 items, got 17" in answer.json()["error"]["message"]


async def test_d6_min_tokens_come_before_the_first_stop() -> None:
    text = "ab" * 30
    _, choice = await answers(text, stop="ab", min_tokens=20)
    assert choice["text"] == text[:20]  # a match that is complete with the 20th token is among the 20
    _, choice = await answers(text, stop="ba", min_tokens=20)
    assert choice["text"] == text[:19]
