"""Cases D3, E, F and H: prompts, limits, messages and refusals that other servers got wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway

#: Shows each message, arguments walked as a mapping; begins with a BOS of its own.
TALKATIVE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% for name, value in call.function.arguments|items %}"
    "({{ name }}={{ value }}){% endfor %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
USER = {"role": "user", "content": "hi"}


def gateway_with(template: str = TALKATIVE, *, bos: bool = False) -> StubGateway:
    return StubGateway(vocabularies.byte_fallback(template) if bos else vocabularies.characters(template))


async def post(gateway: StubGateway, path: str, body: Any) -> httpx.Response:
    async with gateway.client() as client:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await client.post(path, **content)
        # Whatever was wrong, the next request is answered.
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
    return answer


async def completion(gateway: StubGateway, **fields: Any) -> httpx.Response:
    return await post(gateway, "/v1/completions", fields)


async def chat(gateway: StubGateway, messages: list[Any], **fields: Any) -> httpx.Response:
    return await post(gateway, "/v1/chat/completions", {"messages": messages, "max_tokens": 1} | fields)


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    body = answer.json()["error"]
    assert body["type"] == "invalid_request_error"
    assert body["message"]
    return body  # type: ignore[no-any-return]


def prompt(gateway: StubGateway) -> str:
    """The text of the first prompt that went to an engine."""
    table = gateway.text.tokenizer.token_bytes(skip_special_tokens=False)
    return b"".join(table[token] for token in gateway.dispatcher.requests[0].prompts[0]).decode()


async def test_d3_a_logit_bias_key_that_is_no_token_id() -> None:
    assert error(await completion(gateway_with(), prompt="a", logit_bias={"AI": -100}))["param"] == "logit_bias"


@pytest.mark.parametrize("empty", ["", [""], [[]]])
async def test_e1_an_empty_prompt(empty: object) -> None:
    assert error(await completion(gateway_with(), prompt=empty))["param"] == "prompt"


async def test_e1_an_empty_prompt_where_bos_makes_it_a_token() -> None:
    answer = await completion(gateway_with(bos=True), prompt="")
    assert answer.json()["usage"]["prompt_tokens"] == 1


async def test_e2_the_error_names_context_prompt_and_max_tokens() -> None:
    body = error(await completion(gateway_with(), prompt="abcdefgh", max_tokens=2045))
    assert body["code"] == "context_length_exceeded"
    assert all(number in body["message"] for number in ("2048 tokens", "8 tokens", "2045"))
    assert (await completion(gateway_with(), prompt="abcdefgh", max_tokens=2040)).status_code == 200
    error(await completion(gateway_with(), prompt="abcdefgh", max_tokens=2041))


@pytest.mark.parametrize("stream", [False, True])
async def test_e3_a_prompt_longer_than_the_context_is_refused_at_once(stream: bool) -> None:
    body = error(await completion(gateway_with(), prompt="a" * 3000, stream=stream))
    assert body["code"] == "context_length_exceeded"
    body = error(await chat(gateway_with(), [USER | {"content": "a" * 3000}], stream=stream))
    assert body["code"] == "context_length_exceeded"


async def test_e5_a_template_that_writes_bos_gives_one() -> None:
    gateway = gateway_with(bos=True)
    await chat(gateway, [USER])
    await completion(gateway, prompt="hello")
    bos = gateway.text.tokenizer.token_id("<s>")
    first, plain = gateway.dispatcher.requests[0].prompts[0], gateway.dispatcher.requests[2].prompts[0]
    assert first[0] == bos
    assert first.tolist().count(1) == 1
    assert plain.tolist() == [bos, gateway.text.tokenizer.token_id("▁hello")]


async def test_f1_f2_a_template_that_raises_is_quoted() -> None:
    answer = await chat(gateway_with(STRICT), [{"role": "system", "content": "be good"}, USER])
    assert "System role not supported" in error(answer)["message"]
    assert error(await chat(gateway_with("{{ raise_exception('') }}"), [USER]))["message"]


async def test_f3_text_parts_are_all_kept_in_order() -> None:
    gateway = gateway_with()
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    answer = await chat(gateway, [{"role": "user", "content": parts}])
    assert prompt(gateway) == "[user]first\nsecond[assistant]"
    assert answer.json()["usage"]["prompt_tokens"] == len("[user]first\nsecond[assistant]")


CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}


async def test_f4_f5_a_tool_call_in_the_history() -> None:
    gateway = gateway_with()
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    assert (await chat(gateway, history)).status_code == 200
    assert prompt(gateway) == "[user]hi[assistant](a=1)(b=x)[tool]3[assistant]"


async def test_f5_arguments_that_are_no_json_are_passed_as_text_or_refused() -> None:
    call = CALLED | {"function": {"name": "add", "arguments": "a=1"}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    error(await chat(gateway_with(), history))  # this template cannot walk a string
    gateway = gateway_with(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert (await chat(gateway, history)).status_code == 200
    assert prompt(gateway) == "a=1"


async def test_f6_continuing_the_final_message() -> None:
    history = [USER, {"role": "assistant", "content": "The answer is"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error(await chat(gateway_with(), history, **both))["param"] == "continue_final_message"
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    gateway = gateway_with(turns)
    assert (await chat(gateway, history, continue_final_message=True)).status_code == 200
    assert prompt(gateway) == "<user>hi</user><assistant>The answer is"


async def test_f7_an_empty_system_message_is_an_empty_string() -> None:
    for content in ("", [{"type": "text", "text": ""}]):
        gateway = gateway_with("{{ messages[0].content|length }}{{ messages[0].content == '' }}")
        assert (await chat(gateway, [{"role": "system", "content": content}, USER])).status_code == 200
        assert prompt(gateway) == "0True"


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("name", [b"temperature", b"top_p", b"presence_penalty", b"frequency_penalty", b"min_p"])
async def test_h1_numbers_that_are_none(name: bytes, value: bytes) -> None:
    error(await post(gateway_with(), "/v1/completions", b'{"prompt": "a", "%s": %s}' % (name, value)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "\\ud83d"}'),
        ("/v1/completions", b'{"prompt": "a", "stop": "\\ud83d"}'),
        ("/v1/completions", b'{"prompt": "a", "model": "\\udf36"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
    ],
    ids=["prompt", "stop", "model", "message"],
)
async def test_h2_half_a_character_in_json(path: str, body: bytes) -> None:
    error(await post(gateway_with(), path, body))
