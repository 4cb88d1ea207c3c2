from __future__ import annotations

import json
from array import array

import pytest

from gateway import schemas
from gateway.errors import BadRequest
from gateway.schemas import (
    CHAT_KEYS,
    COMPLETION_KEYS,
    REFUSED,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_json,
)
from protocol.sampling import FIELD_NAMES

USER = {"role": "user", "content": "hi"}
#: As deep as JSON may be: deeper than Python compares.
DEEP = parse_json(b'{"deep": ' + b"[" * 1020 + b"]" * 1020 + b"}")["deep"]


def chat(**fields: object) -> ChatRequest:
    return parse_chat({"messages": [USER]} | fields, allow_unknown=False)


def completion(**fields: object) -> CompletionRequest:
    return parse_completion({"prompt": "hi"} | fields, allow_unknown=False)


def test_defaults() -> None:
    options = chat().options
    assert (options.model, options.sampling, options.max_tokens, options.logprobs) == ("", {}, None, None)
    assert (options.n, options.seed, options.stop, options.stream) == (1, None, (), False)
    assert (options.skip_special_tokens, options.include_stop, options.priority, options.cache_salt) == (
        True,
        False,
        0,
        "",
    )
    assert (chat().add_generation_prompt, chat().continue_final_message, chat().add_special_tokens) == (
        True,
        False,
        False,
    )
    assert (completion().echo, completion().add_special_tokens) == (False, True)


def test_null_is_absent() -> None:
    nulls = (
        {key.name: None for key in CHAT_KEYS if key.name != "messages"} | dict.fromkeys(REFUSED) | {"whatever": None}
    )
    assert chat(**nulls) == chat()


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 1}, {"temperature": 1}),
        ({"top_k": -1, "top_p": 0.5, "min_p": 0}, {"top_k": -1, "top_p": 0.5, "min_p": 0}),
        ({"logit_bias": {"7": -100, "12": 1.5}}, {"logit_bias": ((7, -100.0), (12, 1.5))}),
        ({"stop_token_ids": [1, 2], "allowed_token_ids": [3]}, {"stop_token_ids": (1, 2), "allowed_token_ids": (3,)}),
        ({"ignore_eos": True, "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2, "frequency_penalty": 2}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_sampling_fields_go_through(fields: dict[str, object], sampling: dict[str, object]) -> None:
    assert chat(**fields).options.sampling == sampling
    assert completion(**fields).options.sampling == sampling


def test_every_sampling_field_has_a_name_in_both_routes() -> None:
    for keys in (CHAT_KEYS, COMPLETION_KEYS):
        assert set(FIELD_NAMES) <= {key.name for key in keys}


def test_no_field_is_in_two_lists() -> None:
    for keys in (CHAT_KEYS, COMPLETION_KEYS):
        names = [key.name for key in keys]
        assert len(names) == len(set(names))
        assert not set(names) & WITHOUT_EFFECT
        assert not set(names) & REFUSED.keys()
    assert not WITHOUT_EFFECT & REFUSED.keys()


def test_max_completion_tokens_wins_and_is_named() -> None:
    options = chat(max_tokens=5, max_completion_tokens=7).options
    assert (options.max_tokens, options.max_tokens_name) == (7, "max_completion_tokens")
    assert completion(max_tokens=0).options.max_tokens == 0


@pytest.mark.parametrize(
    ("stop", "stops"),
    [("a", ("a",)), (["a", "b", "a"], ("a", "b")), ([], ()), ([str(i) for i in range(16)], tuple(map(str, range(16))))],
)
def test_stop_is_a_string_or_a_list(stop: object, stops: tuple[str, ...]) -> None:
    assert chat(stop=stop).options.stop == stops


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("I", [1, 2]),)),
        ([[1, 2], [3]], (array("I", [1, 2]), array("I", [3]))),
        ([[]], (array("I"),)),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_logprobs_of_the_two_routes() -> None:
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).options.logprobs == 5
    assert chat(logprobs=False).options.logprobs is None
    assert completion(logprobs=0).options.logprobs == 0
    assert completion(logprobs=3).options.logprobs == 3


def test_stream_options() -> None:
    options = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).options
    assert (options.include_usage, options.continuous_usage) == (True, False)
    options = chat(stream=True, stream_options={"continuous_usage_stats": True}).options
    assert (options.include_usage, options.continuous_usage) == (False, True)


def test_what_has_no_effect_is_accepted() -> None:
    assert chat(**dict.fromkeys(WITHOUT_EFFECT, "x"), store=False, modalities=["text"], best_of=1) == chat()
    assert completion(best_of=3, n=3, suffix="").options.n == 3
    assert chat(response_format={"type": "text"}, tool_choice="none", functions=[], function_call="none") == chat()


def test_tools_go_to_the_template_when_they_may_not_be_called() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    assert chat(tools=[tool], tool_choice="none").tools == (tool,)
    assert chat(tools=[]).tools == ()


BAD_SHARED: list[tuple[dict[str, object], str, str]] = [
    ({"temperature": "1"}, "temperature", "must be a number, got '1'"),
    ({"temperature": True}, "temperature", "must be a number, got True"),
    ({"top_k": 1.0}, "top_k", "must be an integer, got 1.0"),
    ({"max_tokens": True}, "max_tokens", "must be an integer, got True"),
    ({"max_tokens": -1}, "max_tokens", "must be between 0 and 2147483647, got -1"),
    ({"n": 0}, "n", "must be between 1 and 128, got 0"),
    ({"n": 129}, "n", "must be between 1 and 128, got 129"),
    ({"seed": 2**63}, "seed", "must be between"),
    ({"seed": "7"}, "seed", "must be an integer"),
    ({"stream": 1}, "stream", "must be true or false, got 1"),
    ({"stream": "true"}, "stream", "must be true or false"),
    ({"model": 3}, "model", "must be a string, got 3"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": ["a", 1]}, "stop", "must be a string, got 1"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items, got 17"),
    ({"stop": "x" * 1025}, "stop", "at most 1024 characters, got 1025"),
    ({"logit_bias": {"AI": -100}}, "logit_bias", "got the key 'AI'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "got the key '-1'"),
    ({"logit_bias": {"1": "2"}}, "logit_bias", "must be a number, got '2'"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 entries, got 1025"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must be between 0 and"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "must be an integer"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64 items"),
    ({"allowed_token_ids": "1"}, "allowed_token_ids", "must be a list"),
    ({"ignore_eos": 0}, "ignore_eos", "must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field 'usage'"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "must be true or false"),
    ({"priority": 2**31}, "priority", "must be between"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "at most 1024"),
    ({"store": True}, "store", "True is not supported: nothing is stored"),
    ({"store": 0}, "store", "0 is not supported"),
    ({"best_of": 3, "n": 2}, "best_of", "must be equal to n"),
    ({"best_of": DEEP, "n": DEEP}, "best_of", "[[[[[...]]]]] is not supported"),
    ({"use_beam_search": True}, "use_beam_search", "no beam search"),
    ({"suffix": "x"}, "suffix", "cannot be inserted"),
    ({"audio": {}}, "audio", "answers are text"),
    ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
    ({"response_format": {"type": "json_object"}}, "response_format", "only {'type': 'text'} is"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave stream out"),
    ({"bad_words": ["a", ""]}, "bad_words", "must not hold an empty string"),
    ({"bad_words": "a"}, "bad_words", "must be a list, got 'a'"),
    ({"bad_words": ["a"] * 257}, "bad_words", "at most 256 items, got 257"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "no token would be left"),
    ({"max_tokenz": 1}, "max_tokenz", "did you mean max_tokens?"),
    ({"zebra": 1}, "zebra", "leave it out (or run the gateway with --allow-unknown-fields)"),
    ({"x" * 5000: 1}, "x" * 5000, "Unknown field 'xxx"),
]


@pytest.mark.parametrize(("fields", "param", "text"), BAD_SHARED)
def test_both_routes_refuse(fields: dict[str, object], param: str, text: str) -> None:
    for parse in (chat, completion):
        with pytest.raises(BadRequest) as caught:
            parse(**fields)
        assert caught.value.param == param
        assert text in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": None}, "messages", "is required"),
        ({"logprobs": 1}, "logprobs", "must be true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be between 0 and 20, got 21"),
        ({"tools": [{}]}, "tools", "send tool_choice 'none'"),
        ({"tools": [{}], "tool_choice": "required"}, "tools", "send tool_choice 'none'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [1], "tool_choice": "none"}, "tools", "must be an object"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "cannot both"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"prompt": "hi"}, "prompt", "Unknown field"),
        ({"echo": True}, "echo", "Unknown field"),
    ],
)
def test_chat_refuses(fields: dict[str, object], param: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)


def test_continuing_needs_something_to_continue() -> None:
    call = {"function": {"name": "f", "arguments": ""}}
    with pytest.raises(BadRequest, match="last message with content"):
        chat(messages=[{"role": "assistant", "tool_calls": [call]}], continue_final_message=True)
    assert chat(continue_final_message=True).add_generation_prompt is False


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": []}, "prompt", "none empty; got []"),
        ({"prompt": 3}, "prompt", "must be a string, a list"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string, a list"),
        ({"prompt": ["a", 1]}, "prompt", "must be a list of token ids"),
        ({"prompt": ["a", [1]]}, "prompt", "must be a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must hold token ids"),
        ({"prompt": [1, 2.5]}, "prompt", "must hold token ids"),
        ({"prompt": [1, -2]}, "prompt", "must hold token ids"),
        ({"prompt": [1, 2**32]}, "prompt", "must hold token ids"),
        ({"prompt": [True, 1]}, "prompt", "must be a list of token ids"),
        ({"prompt": [[1], [True]]}, "prompt", "must be a list of token ids"),
        ({"prompt": ["a"] * 20, "n": 100}, "prompt", "at most 1024, got 2000"),
        ({"prompt": [[1]] * 1025}, "prompt", "at most 1024 prompts, got 1025"),
        ({"logprobs": True}, "logprobs", "must be an integer"),
        ({"logprobs": 21}, "logprobs", "must be between 0 and 20"),
        ({"max_completion_tokens": 1}, "max_completion_tokens", "Unknown field"),
        ({"messages": []}, "messages", "Unknown field"),
    ],
)
def test_completions_refuse(fields: dict[str, object], param: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)


def test_unknown_fields_can_be_let_through_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    schemas._logged.discard("zebra_one")
    for _ in range(3):
        parse_chat({"messages": [USER], "zebra_one": 1}, allow_unknown=True)
    assert [record.__dict__["field"] for record in caplog.records] == ["'zebra_one'"]
    with pytest.raises(BadRequest, match="nothing is stored"):
        parse_chat({"messages": [USER], "store": True}, allow_unknown=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "\\ud83d"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object, got []"),
        (b'"hi"', "must be a JSON object"),
    ],
)
def test_bodies_that_are_no_json_objects_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(BadRequest, match="body") as caught:
        parse_json(body)
    assert text in str(caught.value)


def test_a_body_is_an_object() -> None:
    assert parse_json(json.dumps({"a": "\U0001f336"}).encode()) == {"a": "\U0001f336"}
