import copy
from typing import Any

import orjson
import pytest

from loadtest.compare import Answer, Choice, ToolCall, differences

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


def chat_body() -> dict[str, Any]:
    entries = [{"token": t, "logprob": -0.5, "bytes": list(t.encode()), "top_logprobs": []} for t in ("He", "llo", "!")]
    return {
        "id": "chatcmpl-1",
        "created": 1,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "tool_calls": []},
                "logprobs": {"content": entries, "refusal": None},
                "token_ids": [5, 6, 7],
                "finish_reason": "stop",
                "stop_reason": 2,
            }
        ],
        "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 0}},
    }


def chat_events() -> list[dict[str, Any]]:
    """The same answer in three pieces, its second and third token in one."""
    body = chat_body()
    entries = body["choices"][0]["logprobs"]["content"]

    def event(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {"id": "chatcmpl-2", "created": 2, "choices": [choice], "usage": None}

    return [
        event({"role": "assistant", "content": ""}),
        event({"content": "He"}, logprobs={"content": entries[:1]}, token_ids=[5]),
        event({"content": "llo!"}, logprobs={"content": entries[1:]}, token_ids=[6, 7]),
        event({}, finish_reason="stop", stop_reason=2),
        {"id": "chatcmpl-2", "created": 2, "choices": [], "usage": USAGE},
    ]


def found(expected: Answer, actual: Answer) -> list[str]:
    return [str(difference) for difference in differences(expected, actual)]


def test_stream_equals_unstreamed_answer_whatever_ids_times_borders_and_cached_tokens() -> None:
    assert found(Answer.from_body(chat_body()), Answer.from_events(chat_events())) == []


def test_chat_answer_is_read_whole() -> None:
    answer = Answer.from_events(chat_events())
    assert answer.choices[0].text == "Hello!"
    assert answer.choices[0].token_ids == (5, 6, 7)
    assert answer.choices[0].logprobs == {"content": chat_body()["choices"][0]["logprobs"]["content"]}
    assert answer.usage == USAGE


def test_raw_stream_of_a_text_completion() -> None:
    def event(index: int, text: str, token: int, finish: str | None = None) -> bytes:
        logprobs = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{text: -1.0}], "text_offset": [token]}
        choice = {"index": index, "text": text, "token_ids": [token], "logprobs": logprobs, "finish_reason": finish}
        return b"data: " + orjson.dumps({"choices": [choice]}) + b"\r\n\r\n"

    raw = event(1, "a", 0) + event(0, "x", 0) + b": keep-alive\r\n\r\n" + event(1, "b", 1, "length")
    raw += event(0, "y", 1, "stop") + b"data: [DONE]\r\n\r\n"
    assert Answer.from_stream(raw).choices == {
        0: Choice("xy", "", (0, 1), _logprobs("x", "y"), (), "stop", None),
        1: Choice("ab", "", (0, 1), _logprobs("a", "b"), (), "length", None),
    }


def _logprobs(one: str, two: str) -> dict[str, list[Any] | None]:
    top = [{one: -1.0}, {two: -1.0}]
    return {"tokens": [one, two], "token_logprobs": [-1.0, -1.0], "top_logprobs": top, "text_offset": [0, 1]}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("token_ids", [5, 6, 8], "choice 0: token_ids: expected (5, 6, 7), got (5, 6, 8)"),
        ("token_ids", None, "choice 0: token_ids: expected (5, 6, 7), got None"),
        ("finish_reason", "length", "choice 0: finish_reason: expected 'stop', got 'length'"),
        ("finish_reason", None, "choice 0: finish_reason: the actual choice did not finish"),
        ("stop_reason", "2", "choice 0: stop_reason: expected 2, got '2'"),
        ("stop_reason", None, "choice 0: stop_reason: expected 2, got None"),
        ("logprobs", None, "choice 0: logprobs: expected"),
        ("message", {"content": "Hello?"}, "choice 0: text: expected 'Hello!', got 'Hello?'"),
        ("message", {"content": "Hello!", "reasoning_content": "hm"}, "choice 0: reasoning: expected '', got 'hm'"),
        (
            "message",
            {"content": "Hello!", "tool_calls": [{"id": "r", "function": {"name": "f", "arguments": "{}"}}]},
            "choice 0: tool_calls: expected (), got (ToolCall(name='f', arguments='{}'),)",
        ),
    ],
)
def test_each_field_of_a_choice_counts(field: str, value: object, text: str) -> None:
    changed = chat_body()
    changed["choices"][0][field] = value
    (difference,) = found(Answer.from_body(chat_body()), Answer.from_body(changed))
    assert difference.startswith(text)


def test_one_bit_of_a_logprob_counts() -> None:
    changed = chat_body()
    changed["choices"][0]["logprobs"]["content"][2]["logprob"] = -0.5000000000000001
    (difference,) = found(Answer.from_body(chat_body()), Answer.from_body(changed))
    assert difference.startswith("choice 0: logprobs.content: differs from position 2 of 3 and 3")


def test_usage_counts_without_cached_tokens_only() -> None:
    changed = chat_body()
    changed["usage"]["prompt_tokens_details"]["cached_tokens"] = 8
    assert found(Answer.from_body(chat_body()), Answer.from_body(changed)) == []
    changed["usage"]["prompt_tokens_details"]["audio_tokens"] = 1
    changed["usage"]["completion_tokens"] = 4
    (difference,) = found(Answer.from_body(chat_body()), Answer.from_body(changed))
    assert difference.startswith("answer: usage: expected {'prompt_tokens': 9, 'completion_tokens': 3")


def test_missing_usage_and_missing_choice_are_differences() -> None:
    two = chat_body()
    two["choices"].append(copy.deepcopy(two["choices"][0]) | {"index": 1})
    del two["usage"]
    first, second = found(Answer.from_body(chat_body()), Answer.from_body(two))
    assert first == "choice 1: choice: missing in the expected answer"
    assert second.endswith("got None")


def test_answers_that_failed_alike_are_not_identical() -> None:
    failed = Answer.from_events([*chat_events()[:2], {"error": {"message": "no engine", "code": 503}}])
    texts = found(failed, failed)
    assert texts == [
        "answer: error: the expected answer ended in {'message': 'no engine', 'code': 503}",
        "answer: error: the actual answer ended in {'message': 'no engine', 'code': 503}",
        "choice 0: finish_reason: the expected and the actual choice did not finish",
    ]


def test_empty_answers_are_not_identical() -> None:
    empty = Answer.from_events([])
    assert found(empty, empty) == ["answer: choices: neither answer has any"]


def test_tool_calls_are_joined_by_their_index() -> None:
    pieces = [
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "sub", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    answer = Answer.from_events({"choices": [{"index": 0, "delta": piece}]} for piece in pieces)
    assert answer.choices[0].tool_calls == (ToolCall("add", '{"a":1}'), ToolCall("sub", "{}"))


def test_second_finish_reason_is_an_error() -> None:
    events = chat_events()
    with pytest.raises(ValueError, match=r"choice 0: finish_reason 'stop' after 'stop'"):
        Answer.from_events([*events, events[3]])


def test_long_texts_are_shown_where_they_part() -> None:
    one, other = chat_body(), chat_body()
    one["choices"][0]["message"]["content"] = "x" * 100 + "abc"
    other["choices"][0]["message"]["content"] = "x" * 100
    assert found(Answer.from_body(one), Answer.from_body(other)) == [
        "choice 0: text: differs from position 100 of 103 and 100: expected 'abc', got ''"
    ]
