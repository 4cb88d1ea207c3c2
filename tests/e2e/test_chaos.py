"""The kill matrix and the soak, by the commands that an operator would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest.__main__ import main

FAKE = ("--backend=fake", "--fake-step-ms=2")


def run(tmp_path: Path, command: str, *arguments: str) -> dict[str, Any]:
    """The report of a trial that found nothing."""
    output = tmp_path / "report.json"
    assert main([command, f"--output={output}", *arguments]) == 0
    report: dict[str, Any] = orjson.loads(output.read_bytes())
    return report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_answers_of_a_model_are_identical_after_kills_at_random_tokens(
    tiny_models: Path, tmp_path: Path, kills: int
) -> None:
    flags = (str(tiny_models / "llama_untied"), "--dtype=float32", "--threads=1")
    report = run(tmp_path, "kill", f"--kills={kills}", "--cases=24", "--seed=11", "--", *flags)
    struck = report["blows"]
    assert len(struck) == kills
    assert all(blow["num_resumed"] >= 1 for blow in struck)
    assert len({blow["at_token"] for blow in struck}) > kills // 2
    for options in report["options"].values():
        assert len(options) > 1  # no parameter stood still


def test_blocks_of_a_killed_gateway_are_freed(tmp_path: Path) -> None:
    report = run(tmp_path, "kill", "--kills=1", "--gateway-kills=3", "--cases=12", "--seed=2", "--", *FAKE)
    assert [blow["blow"] for blow in report["blows"]] == ["engine killed", *["gateway killed"] * 3]
    assert max(blow["freed_s"] for blow in report["blows"][1:]) < 10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_minute_of_load_with_clients_that_leave(tmp_path: Path) -> None:
    report = run(tmp_path, "soak", "--duration=60", "--seed=3")
    assert report["failures"] == {}
    assert report["num_left"] > 10
