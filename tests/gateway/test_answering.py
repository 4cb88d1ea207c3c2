"""How a request is answered over time: first token, keep-alive, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gateway import answering
from gateway.errors import EngineFailed, GatewayError
from gateway.replies import CompletionReply
from gateway.stream import Delta, GenerationRequest
from protocol.messages import AbortReason
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway


def events_of(text: str) -> list[Any]:
    """The data of each event; comments are None."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert "\n" not in block
        if block.startswith(":"):
            events.append(None)
            continue
        data = block.removeprefix("data: ")
        assert data != block
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


class Call:
    """One request made to the application by hand, so that the test is the server."""

    def __init__(self, gateway: StubGateway, body: dict[str, object], path: str = "/v1/completions") -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        #: Clear: the client takes no more after the next event.
        self.reading = asyncio.Event()
        self.reading.set()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("gateway", 80),
        }
        self.task = asyncio.create_task(gateway.app()(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            await self.reading.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)


def speaking(text: str, *more: GatewayError) -> StubGateway:
    gateway = StubGateway(vocabularies.characters())
    ids: Sequence[int | GatewayError] = [*gateway.sampled(text), *more]
    gateway.dispatcher.script = lambda _request, _index: ids
    return gateway


async def test_headers_wait_for_the_first_token() -> None:
    gateway = speaking("ab")
    gateway.dispatcher.flow.clear()
    call = Call(gateway, {"prompt": "x", "stream": True})
    await call.until(lambda: gateway.dispatcher.requests)
    await asyncio.sleep(0.02)
    assert call.sent == []
    gateway.dispatcher.flow.set()
    await call.task
    assert call.status == 200
    headers = dict(call.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-accel-buffering"] == b"no"
    assert [event["choices"][0]["text"] for event in events_of(call.body)[:-1]] == ["a", "b", ""]


async def test_an_error_before_the_first_token_is_a_status() -> None:
    gateway = speaking("", EngineFailed("out of luck"))
    call = Call(gateway, {"prompt": "x", "stream": True})
    await call.task
    assert call.status == 500
    assert json.loads(call.body)["error"]["message"] == "out of luck"


async def test_i6_an_error_after_the_first_token_is_an_event_and_the_end() -> None:
    gateway = speaking("ab", EngineFailed("out of luck"))
    call = Call(gateway, {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}})
    await call.task
    assert call.status == 200
    *tokens, error = events_of(call.body)
    assert "".join(event["choices"][0]["text"] for event in tokens) == "ab"
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * len(tokens)
    assert error == {
        "error": {"message": "out of luck", "type": "server_error", "param": None, "code": "engine_failed"}
    }
    assert call.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_an_unforeseen_error_in_a_stream_is_an_event_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(_reply: CompletionReply) -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(CompletionReply, "last_events", crash)
    call = Call(speaking("ab"), {"prompt": "x", "stream": True})
    await call.task
    assert events_of(call.body)[-1]["error"]["type"] == "server_error"
    assert "secret" not in call.body
    assert "stream_crashed" in [record.message for record in caplog.records]


async def test_the_first_keep_alive_sends_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.02)
    gateway = speaking("a", EngineFailed("late"))
    gateway.dispatcher.flow.clear()
    call = Call(gateway, {"prompt": "x", "stream": True})
    await call.until(lambda: len(call.sent) >= 2)
    assert call.status == 200
    assert call.body == ": keep-alive\n\n"
    gateway.dispatcher.flow.set()
    await call.task
    comment, token, error = events_of(call.body)
    assert comment is None
    assert token["choices"][0]["text"] == "a"
    assert error["error"]["message"] == "late"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts_every_choice(stream: bool) -> None:
    gateway = speaking("abc")
    gateway.dispatcher.flow.clear()
    call = Call(gateway, {"prompt": ["x", "y"], "n": 2, "stream": stream})
    await call.until(lambda: gateway.dispatcher.requests)
    call.gone.set()
    await call.task
    assert gateway.dispatcher.left == [(index, AbortReason.CLIENT) for index in range(4)]
    assert call.status == 499


async def test_a_client_that_leaves_a_stream_aborts_every_choice() -> None:
    gateway = speaking("abc" * 100)
    call = Call(gateway, {"prompt": "x", "n": 2, "stream": True, "max_tokens": 1000})
    await call.until(lambda: len(call.sent) > 3)
    gateway.dispatcher.flow.clear()
    call.gone.set()
    await call.task
    assert gateway.dispatcher.left == [(0, AbortReason.CLIENT), (1, AbortReason.CLIENT)]


async def test_a_client_that_leaves_while_it_waits_for_room_cancels_the_wait() -> None:
    gateway = speaking("abc")
    cancelled = asyncio.Event()
    waiting = asyncio.Event()

    async def wait_for_ever(_request: GenerationRequest, _waited_s: float) -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    gateway.dispatcher.start = wait_for_ever  # type: ignore[method-assign, assignment]
    call = Call(gateway, {"prompt": "x"})
    await waiting.wait()
    call.gone.set()
    await call.task
    assert cancelled.is_set()


async def test_a_client_that_leaves_before_its_body_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    gateway = speaking("abc")
    call = Call(gateway, {"prompt": "x"})
    call.gone.set()
    call._body = None
    await call.task
    assert call.status == 499
    assert not [record for record in caplog.records if record.exc_info]
    assert gateway.dispatcher.requests == []


async def test_a_whole_answer_aborts_nothing() -> None:
    gateway = speaking("abc")
    for stream in (False, True):
        call = Call(gateway, {"prompt": "x", "stream": stream})
        await call.task
    assert gateway.dispatcher.left == []


async def test_many_logprobs_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = speaking("abc")
    threads = []
    whole = CompletionReply.whole

    def noted(reply: CompletionReply, deltas: Sequence[Delta]) -> bytes:
        threads.append(threading.current_thread())
        return whole(reply, deltas)

    monkeypatch.setattr(CompletionReply, "whole", noted)
    bodies = []
    for limit in (12, 11):  # 2 choices of 3 tokens, each with itself and an alternative
        monkeypatch.setattr(answering, "INLINE_ENTRIES", limit)
        call = Call(gateway, {"prompt": "x", "n": 2, "logprobs": 1, "max_tokens": 3})
        await call.task
        bodies.append(json.loads(call.body))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert bodies[0]["choices"][1]["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_a_slow_reader_gets_merged_events() -> None:
    gateway = speaking("abcdefgh" * 10)
    call = Call(gateway, {"prompt": "x", "stream": True, "max_tokens": 80})
    call.reading.clear()
    await call.until(lambda: len(call.sent) == 2)
    await call.until(lambda: not gateway.dispatcher.playing)
    call.reading.set()
    await call.task
    first, rest, finish = [event["choices"][0]["text"] for event in events_of(call.body)[:-1]]
    assert (first + rest, finish) == ("abcdefgh" * 10, "")
    assert len(rest) > len(first)
