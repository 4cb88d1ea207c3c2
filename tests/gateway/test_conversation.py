from __future__ import annotations

import pytest

from gateway.conversation import parse_messages
from gateway.errors import BadRequest

USER = {"role": "user", "content": "hi"}


def test_messages_keep_their_order_and_known_fields() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "so", "reasoning": "because", "refusal": None, "annotations": []},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert parse_messages(messages) == (
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "so", "reasoning_content": "because"},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    )


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_messages([{"role": "user", "content": parts}]) == ({"role": "user", "content": "one\ntwo"},)
    assert parse_messages([{"role": "user", "content": []}]) == ({"role": "user", "content": ""},)


def test_null_content_beside_tool_calls_is_left_out_and_arguments_are_parsed() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    [
        ([], "messages", "at least one message"),
        ("hi", "messages", "must be a list"),
        ([USER, 3], "messages[1]", "must be an object, got 3"),
        ([{"content": "hi"}], "messages[0].role", "must be one of system,"),
        ([{"role": "robot", "content": ""}], "messages[0].role", "got 'robot'"),
        ([{"role": ["user"], "content": ""}], "messages[0].role", "got ['user']"),
        ([{"role": "user"}], "messages[0].content", "is required"),
        ([{"role": "user", "content": None}], "messages[0].content", "is required"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content", "is required"),
        ([{"role": "user", "content": 1}], "messages[0].content", "must be a string or a list of text parts, got 1"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]", "must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "got 'image_url': only text is read",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "must be a string, got None",
        ),
        ([USER | {"mood": 1}], "messages[0].mood", "unknown field 'mood'"),
        ([USER | {"name": 1}], "messages[0].name", "must be a string, got 1"),
        ([USER | {"audio": {"id": "a"}}], "messages[0].audio", "not supported"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "must be a list"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]", "must be an object"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}],
            "messages[0].tool_calls[0]",
            "type 'function'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
            "must be a string",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 1}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "must be a string of JSON, got 1",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_place(messages: object, param: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert text in str(caught.value)
