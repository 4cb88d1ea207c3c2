"""The command from its arguments to its files, against a server in the same process."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.result import read_result
from tests.loadtest.mock_server import MODEL, Fault, MockServer, serving


async def bench(server: MockServer, *arguments: str) -> int:
    """Runs the command in a thread: it brings its own event loop."""
    async with serving(server):
        return await asyncio.to_thread(main, ["--url", server.url, *arguments])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


async def test_closed_loop(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = MockServer(first_delay_s=0.02, gap_s=0.005)
    sizes = ["--prompt-tokens", "20", "--output-tokens", "8", "--spread", "0"]
    load = ["--concurrency", "3", "--num-requests", "9", "--repeats", "2", "--seed", "7", "--warmup", "2"]
    assert await bench(server, *sizes, *load, "--api-key", "secret", "--output", str(output)) == 0
    result = read_result(output)
    assert [run["seed"] for run in result["runs"]] == [7, 8]
    for run in result["runs"]:
        summary = run["summary"]
        assert (summary["num_requests"], summary["num_ok"], summary["failures"]) == (9, 9, {})
        assert (summary["output_tokens"], summary["output_events"], summary["tokens_from"]) == (72, 72, {"usage": 9})
        assert (summary["prompt_tokens"], summary["cached_tokens"]) == (360, 144)
        assert summary["ttft_s"]["p50"] > 0.015
        assert summary["itl_s"]["count"] == sum(run["itl_histogram"].values()) == 9 * 7
        assert [row["failure"] for row in run["requests"]] == [None] * 9
        assert run["server_use"] is None
        assert run["client_cpu_s"] > 0
    assert server.most_running == 3
    assert len(server.bodies) == 1 + 2 + 2 * 9  # probe, warm-up, runs
    assert all(b"Authorization: Bearer secret\r\n" in head for head in server.headers)
    assert "secret" not in str(result)
    assert result["command"][:2] == ["sluicegate", "bench"]
    assert "***" in result["command"]
    assert result["server"] == {
        "model": MODEL,
        "version": {"version": "1.2.3"},
        "ignore_eos_sent": True,
        "usage_asked": True,
    }
    assert result["config"]["loop"] == "closed"
    table = capsys.readouterr().out
    assert "| chat | chat | closed, 3 at a time | 18 / 18 |" in table
    assert f"Written to {output}" in table


async def test_open_loop_in_bursts(output: Path) -> None:
    server = MockServer(first_delay_s=0.1)
    sizes = ["--workload", "burst", "--output-tokens", "2", "--burst-size", "5"]
    load = ["--rate", "50", "--num-requests", "15", "--warmup", "0"]
    assert await bench(server, *sizes, *load, "--output", str(output)) == 0
    rows = read_result(output)["runs"][0]["requests"]
    assert [row["due_s"] for row in rows[:5]] == [rows[0]["due_s"]] * 5
    assert len({row["due_s"] for row in rows}) == 3
    assert server.most_running >= 5


async def test_shared_prefix_on_completions(output: Path) -> None:
    server = MockServer()
    sizes = ["--workload", "shared-prefix", "--endpoint", "completions", "--output-tokens", "2"]
    load = ["--concurrency", "1", "--num-requests", "4", "--warmup", "0"]
    assert await bench(server, *sizes, *load, "--server-pid", str(os.getpid()), "--output", str(output)) == 0
    prompts = [body["prompt"].split("\n") for body in server.bodies[1:]]
    assert len({prefix for prefix, _ in prompts}) == 1
    assert len({text for _, text in prompts}) == 4
    run = read_result(output)["runs"][0]
    assert run["summary"]["ttft_later_s"]["count"] == 3
    assert os.getpid() in {process["pid"] for process in run["server_use"]["processes"]}


@pytest.mark.parametrize(
    ("refused", "ignore_eos", "usage", "source"),
    [
        (("ignore_eos",), False, True, "usage"),
        (("stream_options",), True, False, "events"),
        (("ignore_eos", "stream_options"), False, False, "events"),
    ],
)
async def test_fields_that_a_server_refuses_are_left_out(
    refused: tuple[str, ...], ignore_eos: bool, usage: bool, source: str, output: Path
) -> None:
    load = ["--concurrency", "2", "--num-requests", "2", "--output-tokens", "3", "--spread", "0", "--warmup", "0"]
    assert await bench(MockServer(refused_fields=refused), *load, "--output", str(output)) == 0
    result = read_result(output)
    assert (result["server"]["ignore_eos_sent"], result["server"]["usage_asked"]) == (ignore_eos, usage)
    assert result["runs"][0]["summary"]["tokens_from"] == {source: 2}
    assert result["runs"][0]["summary"]["output_tokens"] == 6


async def test_failures_are_kept_and_shown(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [Fault.NONE, Fault.TOO_MANY_REQUESTS, Fault.ERROR_EVENT, Fault.TOO_MANY_REQUESTS, Fault.NONE]
    server = MockServer(fault=faults.__getitem__)
    assert await bench(server, *_one_by_one(4), "--output", str(output)) == 0
    run = read_result(output)["runs"][0]
    assert run["summary"]["num_ok"] == 1
    assert run["summary"]["failures"] == {"http_429": 2, "error_event": 1}
    assert [row["failure"] for row in run["requests"]] == ["http_429", "error_event", "http_429", None]
    assert "**failed: 1 × error_event, 2 × http_429**" in capsys.readouterr().out


async def test_status_is_1_if_nothing_succeeded(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = MockServer(fault=lambda number: Fault.NONE if number == 0 else Fault.CLOSE_AT_ONCE)
    assert await bench(server, *_one_by_one(3), "--output", str(output)) == 1
    assert read_result(output)["runs"][0]["summary"]["failures"] == {"disconnect": 3}
    assert "| 0 / 3 | 0.00 | 0.0 | – |" in capsys.readouterr().out


def _one_by_one(num_requests: int) -> list[str]:
    return ["--concurrency", "1", "--num-requests", str(num_requests), "--warmup", "0", "--output-tokens", "4"]


async def test_server_that_refuses_every_request(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = MockServer(fault=lambda _: Fault.TOO_MANY_REQUESTS)
    assert await bench(server, "--output", str(output)) == 2
    assert capsys.readouterr().err == (
        'bench: POST /v1/chat/completions: http_429: {"error":{"message":"no credit"}}\n'
    )
    assert len(server.bodies) == 1


async def test_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(MockServer()) as server:
        url = server.url
    assert await asyncio.to_thread(main, ["--url", url]) == 2
    assert "Connection refused: is the server up, and is --url its root?" in capsys.readouterr().err


async def test_server_pid_that_is_not_there(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(MockServer(), "--server-pid", "4194305", *_one_by_one(1), "--output", str(output)) == 2
    assert capsys.readouterr().err == "bench: server pid 4194305: no such process\n"


async def test_goodput(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = MockServer(first_delay_s=0.02, gap_s=0.001)
    slo = ["--slo-ttft-ms", "10000", "--slo-itl-ms", "0.001"]
    assert await bench(server, *_one_by_one(3), *slo, "--output", str(output)) == 0
    (run,) = read_result(output)["runs"]
    goodput = run["summary"]["goodput"]
    assert goodput["slo"] == {"ttft_s": 10, "itl_s": 1e-6}
    assert (goodput["num_good"], goodput["share"], goodput["requests_per_s"]) == (0, 0, 0)
    shown = capsys.readouterr().out
    assert "| goodput req/s |" in shown
    assert "goodput counts the 0.0 % of the requests sent with TTFT ≤ 10000 ms and p99 of its ITL ≤ 0.001 ms" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rate", "1", "--concurrency", "1"], "--concurrency: not allowed with argument --rate"),
        (["--workload", "burst", "--concurrency", "1"], "--concurrency: bursts need an open loop"),
        (["--rate", "0"], "--rate: 0: must be above 0 and finite"),
        (["--rate", "inf"], "--rate: inf: must be above 0 and finite"),
        (["--num-requests", "0"], "--num-requests: 0: must be at least 1"),
        (["--prefix-tokens", "-1"], "--prefix-tokens: -1: must be at least 0"),
        (["--spread", "1"], "--spread: 1: must be at least 0 and below 1"),
        (["--extra-body", "[1]"], "--extra-body: must be a JSON object"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--workload", "essay"], "--workload: invalid choice: 'essay'"),
        (["--api", "k"], "unrecognized arguments: --api k"),
    ],
)
def test_bad_options(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "http://127.0.0.1:1", *arguments])
    assert text in capsys.readouterr().err


def test_result_is_never_overwritten(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.write_text("kept")
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--url", "http://127.0.0.1:1", "--output", str(output)])
    assert "exists, and a result is never overwritten" in capsys.readouterr().err
    assert output.read_text() == "kept"


@pytest.fixture
def make_result(tmp_path: Path) -> Callable[..., Any]:
    async def make(name: str, *arguments: str, **server: Any) -> Path:
        path = tmp_path / f"{name}.json"
        assert await bench(MockServer(**server), *_one_by_one(3), "--output", str(path), *arguments) == 0
        return path

    return make


async def test_report_draws_from_files(
    make_result: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = await make_result("one", "--label", "quick")
    two = await make_result("two", "--label", "slow", "--repeats", "2", gap_s=0.01, sends_usage=False)
    three = await make_result(
        "three", "--label", "slow", "--timeout", "0.2", fault=lambda n: Fault.HANG if n == 1 else Fault.NONE
    )
    capsys.readouterr()
    out = tmp_path / "report"
    assert main(["report", str(one), str(two), str(three), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:5]] == ["| quick", "| slow", f"| {three}"]
    assert "tokens counted from text events, the server sends no usage" in shown
    assert (out / "report.md").read_text().startswith(shown)
    for plot in ("ttft", "itl", "throughput"):
        assert (out / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
        assert f"![{plot}]({plot}.png)" in (out / "report.md").read_text()


def test_report_of_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    for content, text in [
        ("{", "not JSON"),
        ("[]", "schema_version None, need 1"),
        ('{"schema_version": 9}', "schema_version 9, need 1: measure again with this version"),
    ]:
        other.write_text(content)
        assert main(["report", str(other)]) == 2
        assert text in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent.json")]) == 2
    assert "absent.json: No such file or directory" in capsys.readouterr().err
