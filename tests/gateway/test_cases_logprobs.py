"""Cases C: logprobs, those of the prompt among them, that other servers got wrong."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gateway import preparation
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway
from tests.gateway.test_answering import events_of

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


def speaking(text: str, files: dict[str, str] | None = None) -> StubGateway:
    gateway = StubGateway(files or vocabularies.characters())
    ids = gateway.sampled(text)
    gateway.dispatcher.script = lambda _request, _index: ids
    return gateway


async def post(gateway: StubGateway, path: str = PATH, **fields: Any) -> dict[str, Any]:
    async with gateway.client() as client:
        answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = orjson.loads(answer.content)  # refuses NaN and Infinity
    return body


async def refusal(gateway: StubGateway, path: str = PATH, **fields: Any) -> dict[str, Any]:
    async with gateway.client() as client:
        answer = await client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_c1_every_number_is_finite() -> None:
    body = await post(speaking("yz"), prompt="abc", echo=True, logprobs=1, top_k=1, temperature=1, prompt_logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25, -0.5, -0.5]


async def test_c4_echo_without_new_tokens_scores_the_prompt() -> None:
    body = await post(speaking("unheard"), prompt="abcd", echo=True, max_tokens=0, logprobs=1)
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 0,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -0.125, -0.25, -0.375],
        "top_logprobs": [
            None,
            {"c": -1.0, "b": -0.125},
            {"d": -1.0, "c": -0.25},
            {"e": -1.0, "d": -0.375},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    # OpenAI's first entry is null too, which its SDK takes as it does not validate.
    parsed = Completion.construct(**body).choices[0].logprobs
    assert parsed is not None
    assert parsed.token_logprobs == [None, -0.125, -0.25, -0.375]


async def test_max_tokens_0_without_echo_is_an_empty_answer() -> None:
    for fields in ({}, {"logprobs": 1}, {"prompt_logprobs": 0}):
        (choice,) = (await post(speaking("unheard"), prompt="abcd", max_tokens=0, **fields))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", " hello", "hello hello", "hello", "\n\n", "é ñ\n日本 hello"])
async def test_c5_token_strings_of_a_sentencepiece_prompt_are_the_prompt(prompt: str) -> None:
    gateway = speaking(" hello", vocabularies.byte_fallback())
    (choice,) = (await post(gateway, prompt=prompt, echo=True, max_tokens=9, logprobs=0))["choices"]
    logprobs = choice["logprobs"]
    bos, *tokens = logprobs["tokens"]
    assert (bos, logprobs["text_offset"][0], logprobs["token_logprobs"][0]) == ("<s>", 0, None)
    pieces = [_raw(token) for token in tokens]
    assert b"".join(pieces).decode() == choice["text"]
    assert choice["text"].startswith(prompt)
    begins, at = [], 0
    for piece in pieces:
        whole = b"".join(pieces)[:at].decode(errors="ignore")
        begins.append(len(whole))
        at += len(piece)
    assert logprobs["text_offset"][1:] == begins


def _raw(token: str) -> bytes:
    """A token's bytes; OpenAI writes those that are no whole characters as `bytes:\\xe6`."""
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


async def test_c5_a_prompt_of_ids_and_special_tokens_in_a_text() -> None:
    gateway = speaking("", vocabularies.byte_fallback())
    ids = gateway.sampled("hello hello")
    (choice,) = (await post(gateway, prompt=[1, *ids], echo=True, max_tokens=0, logprobs=0))["choices"]
    assert "".join(choice["logprobs"]["tokens"][1:]) == choice["text"]
    (choice,) = (await post(gateway, prompt="hello</s>hello", echo=True, max_tokens=0, logprobs=0))["choices"]
    assert choice["text"] == "hello</s>hello"
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert (tokens[:3], offsets[:4]) == (["<s>", "hello", "</s>"], [0, 0, 5, 9])


async def test_c7_logprobs_0_gives_the_prompts_own_tokens() -> None:
    (choice,) = (await post(speaking("z"), prompt="abc", echo=True, logprobs=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.125}, {"c": -0.25}, {"z": -0.5}]


async def test_echo_with_several_prompts_and_choices_streamed_and_whole() -> None:
    fields = {"prompt": ["ab", "cde"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 3}
    whole = (await post(speaking("xyz"), **fields))["choices"]
    assert [choice["text"] for choice in whole] == ["abxyz", "abxyz", "cdexyz", "cdexyz"]
    assert [choice["logprobs"]["tokens"] for choice in whole] == [[*choice["text"]] for choice in whole]
    assert [choice["logprobs"]["token_logprobs"].count(None) for choice in whole] == [1, 1, 1, 1]
    async with speaking("xyz").client() as client:
        streamed = await client.post(PATH, json=fields | {"stream": True})
    *events, done = events_of(streamed.text)
    assert done == "[DONE]"
    for choice in whole:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        lists = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        assert {name: [entry for part in lists for entry in part[name]] for name in lists[0]} == choice["logprobs"]


async def test_prompt_logprobs_have_vllms_shape_on_both_routes() -> None:
    expected = [
        None,
        {
            "66": {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
            "67": {"logprob": -1.0, "rank": 1, "decoded_token": "c"},
            "68": {"logprob": -2.0, "rank": 2, "decoded_token": "d"},
        },
    ]
    body = await post(speaking("yz"), prompt=["ab", "a"], prompt_logprobs=2, logprobs=1, max_tokens=2)
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, [None]]
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [["y", "z"]] * 2
    body = await post(
        speaking("yz"), CHAT_PATH, messages=[{"role": "user", "content": "b"}], prompt_logprobs=0, max_tokens=2
    )
    rendered = "user: b\nassistant: "
    own = [next(iter(entries.values())) for entries in body["prompt_logprobs"][1:]]
    assert body["prompt_logprobs"][0] is None
    assert "".join(entry["decoded_token"] for entry in own) == rendered[1:]
    assert all(len(entries) == 1 for entries in body["prompt_logprobs"][1:])
    assert ChatCompletion.model_validate(body).choices[0].message.content == "yz"


async def test_the_two_shapes_together_have_each_its_own_width() -> None:
    (choice,) = (await post(speaking("z"), prompt="abc", echo=True, logprobs=0, prompt_logprobs=3))["choices"]
    assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [4, 4]
    assert [len(entries) for entries in choice["logprobs"]["top_logprobs"][1:]] == [1, 1, 1]


async def test_too_many_logprobs_of_prompts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_PROMPT_ENTRIES", 47)
    assert (await post(speaking("z"), prompt=["abcd", "abcd"], n=2, echo=True, logprobs=1))["choices"]
    error = await refusal(speaking("z"), prompt=["abcd", "abcd"], n=2, echo=True, logprobs=2)
    assert error["param"] == "logprobs"
    assert "at most 47, got 48" in error["message"]
    error = await refusal(speaking("z"), prompt="abcdefgh", prompt_logprobs=5)
    assert error["param"] == "prompt_logprobs"


async def test_bad_words_go_to_the_engine_as_inside_a_text_and_after_a_space() -> None:
    gateway = speaking("z", vocabularies.byte_fallback())
    await post(gateway, prompt="a", bad_words=["hello", " hello", "hell"])
    token = gateway.text.tokenizer.token_id
    (request,) = gateway.dispatcher.requests
    space, bare = token("▁hello"), [token(piece) for piece in ("▁", "hell")]
    assert request.sampling.bad_words == ((space,), (token("▁"), space), (*bare,), (token("▁"), *bare))
    error = await refusal(gateway, prompt="a", bad_words=["ok", "日" * 30])
    assert error["param"] == "bad_words"
    assert "at most 64" in error["message"]


async def test_long_prompts_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"prompt": "ab" * 700, "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = (await post(speaking("z"), **fields))["choices"]
    assert len(choice["logprobs"]["tokens"]) == 1401
    async with speaking("z").client() as client:
        streamed = await client.post(PATH, json=fields | {"stream": True})
    first = events_of(streamed.text)[0]["choices"][0]
    assert first["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"][:1400]
