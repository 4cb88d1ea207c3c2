from __future__ import annotations

from loadtest.asking import ask
from loadtest.transport import HttpClient
from tests.loadtest.mock_server import MODEL, MockServer, serving

PATH = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": True}


async def test_a_streamed_answer() -> None:
    server = MockServer(first_delay_s=0.05)
    async with serving(server), HttpClient(server.url) as client:
        asked = await ask(client, PATH, BODY)
    assert (asked.status, asked.failure) == (200, "")
    assert asked.answer is not None
    assert asked.answer.choices[0].finish_reason == "length"
    assert 0.05 <= asked.longest_pause_s <= asked.ended_at - asked.began_at


async def test_nobody_listens() -> None:
    async with HttpClient("http://127.0.0.1:9") as client:
        asked = await ask(client, PATH, BODY)
    assert asked.answer is None
    assert asked.status == 0
    assert asked.failure.startswith("ConnectionRefusedError")
