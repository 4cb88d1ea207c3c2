"""Cases A: faults that other servers had in their streams."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.stream import GenerationRequest
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway
from tests.gateway.test_answering import events_of

PEPPER = "\U0001f336"
ANSWER = f"One {PEPPER} 안녕하세요, and the é of café. Ünïcode \u200d ends here."


def speaking(text: str | bytes) -> StubGateway:
    gateway = StubGateway(vocabularies.byte_level())
    ids = byte_ids(gateway, text.encode() if isinstance(text, str) else text)
    gateway.dispatcher.script = lambda _request, _index: ids
    gateway.dispatcher.paced = True
    return gateway


def byte_ids(gateway: StubGateway, raw: bytes) -> list[int]:
    table = gateway.text.tokenizer.token_bytes(skip_special_tokens=False)
    by_byte = {table[token]: token for token in range(256)}
    return [by_byte[bytes([byte])] for byte in raw]


async def both_ways(gateway: StubGateway, body: dict[str, Any]) -> tuple[list[str], str]:
    """The texts of the stream's events, and the text of the same request without stream."""
    async with gateway.client() as client:
        events = events_of((await client.post("/v1/completions", json=body | {"stream": True})).text)
        whole = (await client.post("/v1/completions", json=body)).json()
    assert events[-1] == "[DONE]"
    return [event["choices"][0]["text"] for event in events[:-1]], whole["choices"][0]["text"]


@pytest.mark.parametrize("num_missing", [1, 2, 3])
@pytest.mark.parametrize("completed", [True, False])
async def test_a1_a_prompt_that_ends_inside_a_character(num_missing: int, completed: bool) -> None:
    raw = f"Hello world {PEPPER}".encode()
    gateway = speaking((raw[-num_missing:] if completed else b"") + b" and more")
    pieces, whole = await both_ways(gateway, {"prompt": byte_ids(gateway, raw[:-num_missing])})
    assert "".join(pieces) == whole == (f"{PEPPER} and more" if completed else " and more")


async def test_a2_only_whole_characters_are_sent() -> None:
    pieces, whole = await both_ways(speaking(ANSWER), {"prompt": "x", "max_tokens": 1000})
    assert "".join(pieces) == whole == ANSWER
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("num_tokens", range(1, 5))
async def test_a2_an_answer_cut_inside_a_character_ends_in_one_replacement(num_tokens: int) -> None:
    pieces, whole = await both_ways(speaking(PEPPER), {"prompt": "x", "max_tokens": num_tokens})
    assert "".join(pieces) == whole == (PEPPER if num_tokens == 4 else "\ufffd")
    assert sum(piece.count("\ufffd") for piece in pieces[:-2]) == 0


async def test_a3_usage_is_null_but_in_one_extra_last_chunk() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    async with speaking("hello").client() as client:
        *events, done = events_of((await client.post("/v1/chat/completions", json=body)).text)
    assert done == "[DONE]"
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert all(event["choices"] for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    body.pop("stream_options")
    async with speaking("hello").client() as client:
        events = events_of((await client.post("/v1/chat/completions", json=body)).text)
    assert not any("usage" in event for event in events[:-1])


async def test_a4_the_last_text_comes_before_the_end() -> None:
    gateway = speaking(ANSWER)
    for max_tokens in range(1, 41):
        pieces, whole = await both_ways(gateway, {"prompt": "x", "max_tokens": max_tokens})
        assert "".join(pieces) == whole
        assert pieces[-1] == ""  # the event with the finish reason


async def test_a6_usage_of_a_stream_counts_all_prompts_and_choices() -> None:
    gateway = speaking("")
    lengths = [3, 5, 2, 7]

    def script(_request: GenerationRequest, index: int) -> list[int]:
        return byte_ids(gateway, b"abcdefgh"[: lengths[index]])

    gateway.dispatcher.script = script
    body: dict[str, Any] = {"prompt": ["one", "three"], "n": 2}
    async with gateway.client() as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of((await client.post("/v1/completions", json=streamed)).text)
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 17, 25)
    assert usage == whole["usage"]
    for index, length in enumerate(lengths):
        pieces = [e["choices"][0]["text"] for e in events[:-2] if e["choices"][0]["index"] == index]
        assert "".join(pieces) == "abcdefgh"[:length]
