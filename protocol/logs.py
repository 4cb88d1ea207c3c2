"""Logging to stderr: text on a terminal, one JSON object a line elsewhere.

A call names an event and gives its facts apart: `log.info("engine_ready", extra={"epoch": 7})`.
The request id is such a fact; prompt text and secrets never are.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]

#: Attributes that every record has; what else a record carries came in through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def configure(level: LogLevel, style: LogFormat) -> None:
    """Send every logger's records to stderr, once, in the style asked for."""
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # What no line here shows need not be found out for each record: a tenth of its time.
    logging.logThreads = logging.logMultiprocessing = False


def facts(record: logging.LogRecord) -> dict[str, object]:
    """What the call gave in `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


#: Made once: `json.dumps` makes an encoder each time that it is given a `default`.
_to_json = json.JSONEncoder(default=str).encode


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "event": record.getMessage(),
        }
        line |= facts(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _to_json(line)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():<7} {record.name}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in facts(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
