"""Bodies and events of both routes: OpenAI's shapes, and the bytes of whole transcripts."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.messages import Logprobs, f32, u32
from tests.gateway import stub_engines, vocabularies
from tests.gateway.stub_engines import StubGateway
from tests.gateway.test_answering import events_of

GOLDEN = Path(__file__).parents[1] / "golden"
OPENAI = Path(__file__).parents[2].parent / "shared/openai/openapi_chat_completions.json"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PEPPER = "\U0001f336"


def speaking(text: str, **changes: Any) -> StubGateway:
    gateway = StubGateway(vocabularies.byte_level(), **changes)
    ids = gateway.sampled(text)
    gateway.dispatcher.script = lambda _request, index: ids[index:]
    return gateway


async def post(gateway: StubGateway, path: str, body: dict[str, Any]) -> httpx.Response:
    async with gateway.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def chat(gateway: StubGateway, **fields: Any) -> Any:
    answer = await post(gateway, "/v1/chat/completions", CHAT | fields)
    return events_of(answer.text) if fields.get("stream") else answer.json()


async def completion(gateway: StubGateway, **fields: Any) -> Any:
    answer = await post(gateway, "/v1/completions", {"prompt": "hi"} | fields)
    return events_of(answer.text) if fields.get("stream") else answer.json()


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat", "/v1/chat/completions", CHAT | {"max_tokens": 6}),
        ("chat_stream", "/v1/chat/completions", CHAT | {"max_tokens": 4, "n": 2, "stream": True}),
        (
            "chat_stream_rich",
            "/v1/chat/completions",
            CHAT
            | {"stream": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 6, "return_token_ids": True}
            | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        ("completion", "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "logprobs": 1}),
        (
            "completion_stream",
            "/v1/completions",
            {"prompt": "ab", "echo": True, "stream": True, "stop": "o", "stream_options": {"include_usage": True}},
        ),
    ],
)
async def test_transcripts_byte_for_byte(
    name: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are read by people: a change in them is a change for every client."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{7:0{2 * size}x}")
    monkeypatch.setattr(time, "time", lambda: 1_750_000_000.0)
    gateway = speaking(f"h{PEPPER} hello")
    gateway.dispatcher.paced = bool(body.get("stream"))
    answer = await post(gateway, path, body)
    golden = GOLDEN / f"{name}.txt"
    assert answer.content == golden.read_bytes()


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    gateway = StubGateway(vocabularies.characters())
    gateway.dispatcher.script = lambda _request, index: gateway.sampled(str(index))
    body = {"prompt": ["a", "bc"], "n": 3}
    choices = (await completion(gateway, **body))["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(i, str(i)) for i in range(6)]
    (request,) = gateway.dispatcher.requests
    assert [list(prompt_ids) for prompt_ids in request.prompts] == [gateway.sampled("a"), gateway.sampled("bc")]


async def test_usage_counts_a_prompt_once_and_its_cached_tokens() -> None:
    gateway = speaking("hello")
    gateway.dispatcher.cached_tokens = 1
    usage = (await completion(gateway, prompt=["abc", "de"], n=2, max_tokens=2))["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_continuous_usage_grows_to_the_total() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await completion(speaking("hello"), stream=True, stream_options=options, max_tokens=3)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize(
    ("fields", "finish_reason", "stop_reason", "text"),
    [
        ({"max_tokens": 3}, "length", None, "hel"),
        ({"stop": "l"}, "stop", "l", "he"),
        ({"stop": "l", "include_stop_str_in_output": True}, "stop", "l", "hel"),
        ({"stop_token_ids": [256]}, "stop", 256, "hello"),
        ({"stop": ["<end>"]}, "stop", "<end>", "hello"),
        ({"stop": ["<end>"], "stop_token_ids": [256]}, "stop", 256, "hello"),
        ({}, "stop", None, "hello"),
        ({"ignore_eos": True}, "length", None, "hello!"),
        ({"ignore_eos": True, "skip_special_tokens": False}, "length", None, "hello<end>!"),
    ],
)
async def test_finish_and_stop_reasons(
    fields: dict[str, Any], finish_reason: str, stop_reason: object, text: str
) -> None:
    gateway = speaking("hello<end>!", eos_ids=(256,))
    whole = (await completion(gateway, **fields))["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"], whole["text"]) == (finish_reason, stop_reason, text)
    *chunks, last, done = await completion(gateway, stream=True, **fields)
    assert done == "[DONE]"
    finish = last["choices"][0]
    assert (finish["finish_reason"], finish["stop_reason"]) == (finish_reason, stop_reason)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) + finish["text"] == text
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}


async def test_c2_exactly_k_alternatives_and_the_chosen_token_besides() -> None:
    content = (await chat(speaking("ab"), logprobs=True, top_logprobs=5))["choices"][0]["logprobs"]["content"]
    for entry in content:
        tops = entry["top_logprobs"]
        assert [top["logprob"] for top in tops] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert entry["logprob"] == -0.5
        assert entry["token"] not in [top["token"] for top in tops]


async def test_c3_chat_logprobs_have_the_chat_shape_in_stream_and_whole() -> None:
    gateway = speaking(f"a{PEPPER}")
    whole = (await chat(gateway, logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]
    assert set(whole) == {"content", "refusal"}
    assert [entry["token"] for entry in whole["content"]] == [
        "a",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x8c",
        "bytes:\\xb6",
    ]
    assert bytes(byte for entry in whole["content"] for byte in entry["bytes"]).decode() == f"a{PEPPER}"
    events = await chat(gateway, logprobs=True, top_logprobs=1, stream=True)
    choices = [event["choices"][0] for event in events[:-1]]
    assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]] == whole[
        "content"
    ]


async def test_c7_logprobs_0_gives_the_chosen_tokens() -> None:
    logprobs = (await completion(speaking("ab"), logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]


async def test_completion_logprobs_offsets_are_characters_of_the_text() -> None:
    gateway = speaking(f"a{PEPPER}b<end>c")
    whole = (await completion(gateway, logprobs=0))["choices"][0]
    logprobs = whole["logprobs"]
    assert logprobs["tokens"][0] == "a"
    assert logprobs["tokens"][-2:] == ["<end>", "c"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 3]
    assert whole["text"] == f"a{PEPPER}bc"
    events = await completion(gateway, logprobs=0, stream=True)
    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in events[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == logprobs


async def test_e4_each_choice_has_its_own_logprobs() -> None:
    choices = (await completion(speaking("hello"), prompt=["a", "b"], logprobs=1))["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [list("hello"), list("ello")]


async def test_c1_an_impossible_tokens_logprob_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Logprobs(1, f32([-float("inf")]), u32([9]), u32([70]), f32([-float("inf")]))
    monkeypatch.setattr(stub_engines, "_rows", lambda _request, _token: rows)
    whole = await completion(speaking("a"), logprobs=1)
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    entry = (await chat(speaking("a"), logprobs=True, top_logprobs=1))["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


async def test_token_ids_are_returned_when_asked() -> None:
    gateway = speaking("hello")
    ids = gateway.sampled("hello")
    whole = (await completion(gateway, return_token_ids=True))["choices"][0]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (ids, gateway.sampled("hi"))
    events = [event["choices"][0] for event in (await chat(gateway, return_token_ids=True, stream=True))[:-1]]
    assert events[0]["prompt_token_ids"] == gateway.sampled("user: hi\nassistant: ")
    assert [token for event in events for token in event.get("token_ids", [])] == ids


async def test_held_back_text_makes_no_empty_events() -> None:
    events = await completion(speaking("hello"), stop="hellx", stream=True)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["hello", ""]


# --- OpenAI's own schema ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    if not OPENAI.exists():
        pytest.skip("OpenAI's schema of the two routes is not beside this checkout")
    return _modern(json.loads(OPENAI.read_text()))  # type: ignore[no-any-return]


def _modern(node: Any) -> Any:
    """OpenAPI 3.0's `nullable` as JSON Schema's null type."""
    if isinstance(node, list):
        return [_modern(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    node = {key: _modern(entry) for key, entry in node.items()}
    return {"anyOf": [node, {"type": "null"}]} if node.pop("nullable", False) is True else node


def check(schemas: dict[str, Any], name: str, value: Any) -> None:
    import jsonschema

    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": schemas["components"]})


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"stop": "l"}], ids=["plain", "logprobs", "stop"]
)
async def test_chat_answers_fit_openais_schema(schemas: dict[str, Any], fields: dict[str, Any]) -> None:
    check(schemas, "CreateChatCompletionResponse", await chat(speaking("hello"), **fields))
    options = {"include_usage": True}
    for event in (await chat(speaking("hello"), stream=True, stream_options=options, **fields))[:-1]:
        check(schemas, "CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": 2, "prompt": ["a", "b"]}], ids=["plain", "logprobs"])
async def test_completions_fit_openais_schema(schemas: dict[str, Any], fields: dict[str, Any]) -> None:
    check(schemas, "CreateCompletionResponse", await completion(speaking("hello"), **fields))


async def test_models_and_errors_fit_openais_schema(schemas: dict[str, Any]) -> None:
    async with speaking("a").client() as client:
        check(schemas, "ListModelsResponse", (await client.get("/v1/models")).json())
        check(schemas, "Model", (await client.get("/v1/models/tiny")).json())
        check(schemas, "ErrorResponse", (await client.post("/v1/completions", json={})).json())
