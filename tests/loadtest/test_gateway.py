"""The measurement of a gateway: what it reads from streams, and one small run from end to end."""

import asyncio
from pathlib import Path

import orjson
import pytest

from engine.backends.fake_tokenizer import LONG_WORD, LONG_WORD_TEXT
from loadtest.__main__ import main
from loadtest.gateway import LONG_TEXT, LONG_TOKEN, read_stream
from loadtest.servers import TrialError


def chunk(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


def usage(num_tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens


DONE = b"data: [DONE]\n\n"


def test_the_long_token_is_the_fake_engines() -> None:
    assert (LONG_TOKEN, LONG_TEXT) == (LONG_WORD, LONG_WORD_TEXT)


def test_joined_tokens_have_the_time_of_their_event() -> None:
    pieces = [
        (1.0, chunk("") + chunk(LONG_TEXT)),
        (2.0, chunk(LONG_TEXT * 2)[:30]),
        (3.0, chunk(LONG_TEXT * 2)[30:]),
        (4.0, usage(3) + DONE),
    ]
    arrivals = read_stream(200, pieces)
    assert (arrivals.times, arrivals.num_events) == ([1.0, 3.0, 3.0], 2)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b"busy", "status 503: b'busy'"),
        (200, chunk(LONG_TEXT) + usage(1), "ended after 1 events without"),
        (200, chunk(LONG_TEXT) + DONE, "ended after 1 events without its usage"),
        (200, chunk(LONG_TEXT) + usage(2) + DONE, "2 tokens were generated, 1 came"),
        (200, chunk(LONG_TEXT[:-1]) + usage(1) + DONE, "which is not the long token's"),
        (200, b'data: {"error":{"message":"gone"}}\n\n', "ended with an error: .*gone"),
    ],
)
def test_a_stream_that_is_not_whole_is_no_measurement(status: int, body: bytes, reason: str) -> None:
    with pytest.raises(TrialError, match=reason):
        read_stream(status, [(1.0, body)])


async def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gateway.json"
    sizes = ["--streams=6", "--latency-streams=3", "--full-speed-streams=2", "--tokens=20", "--first-writes=2"]
    arguments = ["gateway", *sizes, "--rate=20", "--repeats=1", f"--output={output}"]
    status = await asyncio.to_thread(main, arguments)  # it brings its own event loop
    report = orjson.loads(output.read_bytes())
    (run,) = report["runs"]
    for part, num_streams in (("paced", 6), ("latency", 3), ("full_speed", 2)):
        cost = run[part]
        assert (cost["streams"], cost["num_tokens"]) == (num_streams, num_streams * 20)
        assert 0 < cost["num_events"] <= cost["num_tokens"]
        assert cost["cpu_us_per_token"] == pytest.approx(cost["cpu_s"] / cost["num_tokens"] * 1e6)
        assert cost["cpu_s"] >= 0  # in ticks of 10 ms
    for part in ("paced", "latency"):
        assert run[part]["wall_s"] > 19 * 0.05  # the pace is kept
        assert run[part]["send_to_client_s"]["count"] == run[part]["num_tokens"]
        assert run[part]["send_to_client_s"]["p50"] > 0
    assert run["full_speed"]["send_to_client_s"] is None
    assert run["first_write_s"]["count"] == 2
    joined = any(run[part]["num_events"] < run[part]["num_tokens"] for part in ("paced", "latency"))
    assert status == joined
    assert report["command"] == ["python", "-m", "loadtest", *arguments]
    shown = capsys.readouterr().out
    assert "| gateway, µs of processor a token | ≤ 30, goal 20 |" in shown
    assert output.with_suffix(".md").read_text().startswith(shown.rstrip("\n"))
    assert output.with_suffix(".png").stat().st_size > 10_000
