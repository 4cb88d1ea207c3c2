import asyncio
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest

from loadtest.client import Endpoint, FailureKind, Outcome, Target, TokenSource, complete
from loadtest.transport import HttpClient
from loadtest.workload import Prompt
from tests.loadtest.mock_server import Fault, MockServer, serving

PROMPT = Prompt(prefix="", prefix_index=0, text="time year", output_tokens=10)
CHAT = Target("m", Endpoint.CHAT, ignore_eos=True, include_usage=True, extra_body={}, timeout_s=10)


async def measure(server: MockServer, target: Target = CHAT) -> Outcome:
    async with serving(server), HttpClient(server.url) as client:
        return await complete(client, target, PROMPT)


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_times_are_those_of_the_server(endpoint: Endpoint, line_end: bytes) -> None:
    server = MockServer(first_delay_s=0.2, gap_s=0.03, line_end=line_end)
    outcome = await measure(server, replace(CHAT, endpoint=endpoint))
    assert outcome.failure is None
    assert outcome.first_text_at is not None
    # Against the server's own clock, so that a busy machine does not matter.
    gaps = [later - earlier for earlier, later in pairwise(server.text_sent_at)]
    assert outcome.first_text_at == pytest.approx(server.text_sent_at[0], abs=0.01)
    assert outcome.last_text_at == pytest.approx(server.text_sent_at[-1], abs=0.01)
    assert outcome.itl_s == pytest.approx(gaps, abs=0.01)
    assert outcome.tpot_s == pytest.approx(sum(gaps) / 9, abs=0.002)
    assert outcome.ttft_s == outcome.first_text_at - outcome.sent_at
    assert outcome.ttft_s > 0.19  # not when the empty delta or the comment came
    assert outcome.e2e_s >= outcome.ttft_s + sum(outcome.itl_s)
    assert (outcome.num_events, outcome.num_tokens, outcome.tokens_from) == (10, 10, TokenSource.USAGE)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.finish_reason) == (40, 16, "length")


async def test_tokens_of_merged_events_come_from_usage() -> None:
    outcome = await measure(MockServer(tokens_per_event=4, gap_s=0.04))
    assert (outcome.num_events, outcome.num_tokens) == (3, 10)
    assert outcome.tpot_s == pytest.approx(sum(outcome.itl_s) / 9)


async def test_without_usage_events_are_counted() -> None:
    outcome = await measure(MockServer(sends_usage=False, chunked=False))
    assert (outcome.num_tokens, outcome.tokens_from) == (10, TokenSource.EVENTS)
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (None, None)


@pytest.mark.parametrize(
    ("fault", "key", "detail"),
    [
        (Fault.TOO_MANY_REQUESTS, "http_429", '{"error":{"message":"no credit"}}'),
        (Fault.CLOSE_AT_ONCE, "disconnect", "the connection was closed before the response"),
        (Fault.CLOSE_MID_STREAM, "disconnect", "the connection was closed in the middle of the response"),
        (Fault.ERROR_EVENT, "error_event", "{'message': 'engine lost', 'code': 503}"),
        (Fault.BAD_JSON, "bad_event", "b'{oops}'"),
        (Fault.BAD_SHAPE, "bad_event", "b'{\"choices\":[7]}'"),
        (Fault.NOT_HTTP, "protocol", "not HTTP/1.1"),
        (Fault.END_WITHOUT_FINISH, "truncated", "after 5 text events"),
    ],
)
async def test_each_failure_has_its_kind(fault: Fault, key: str, detail: str) -> None:
    outcome = await measure(MockServer(fault=lambda _: fault))
    assert outcome.failure is not None
    assert outcome.failure.key == key
    assert detail in outcome.failure.detail
    assert outcome.num_events in (0, 5)


async def test_stream_without_text_is_a_failure() -> None:
    outcome = await measure(MockServer(fault=lambda _: Fault.NO_TEXT), replace(CHAT, extra_body={"max_tokens": 1}))
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.NO_TEXT
    assert outcome.ttft_s is None


async def test_hanging_stream_times_out() -> None:
    outcome = await measure(MockServer(fault=lambda _: Fault.HANG), replace(CHAT, timeout_s=0.2))
    assert outcome.failure is not None
    assert (outcome.failure.key, outcome.failure.detail) == ("timeout", "not complete after 0.2 s")
    assert outcome.num_events == 5
    assert 0.2 <= outcome.e2e_s < 5


async def test_refused_connection() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    async with HttpClient(f"http://127.0.0.1:{port}") as client:
        outcome = await complete(client, CHAT, PROMPT)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.CONNECT


def test_chat_body() -> None:
    target = replace(CHAT, extra_body={"temperature": 0.9, "cache_salt": "a"})
    assert orjson.loads(target.body(replace(PROMPT, prefix="rules"))) == {
        "model": "m",
        "messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "time year"}],
        "max_tokens": 10,
        "temperature": 0.9,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "a",
    }


def test_completion_body_of_a_plain_server() -> None:
    target = replace(CHAT, endpoint=Endpoint.COMPLETIONS, ignore_eos=False, include_usage=False)
    assert orjson.loads(target.body(replace(PROMPT, prefix="rules"))) == {
        "model": "m",
        "prompt": "rules\ntime year",
        "max_tokens": 10,
        "temperature": 0.0,
        "stream": True,
    }
