"""What a log line looks like on a terminal and elsewhere."""

from __future__ import annotations

import json
import logging

import pytest

from protocol import logs


@pytest.fixture(autouse=True)
def _restored_root() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_has_event_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "auto")  # no terminal here
    logging.getLogger("engine.server").info("engine_ready", extra={"epoch": 7})
    logging.getLogger("engine.server").debug("unheard")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["event"] == "engine_ready"
    assert (record["epoch"], record["level"], record["logger"]) == (7, "info", "engine.server")


def test_json_keeps_an_exception_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: wrong")


def test_text_has_event_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "text")
    logging.getLogger("x").debug("engine_ready", extra={"epoch": 7})
    assert capsys.readouterr().err.endswith(" debug   x: engine_ready epoch=7\n")
