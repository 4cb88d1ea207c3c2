"""The JSON of a measurement: everything that is needed to believe it, to draw it, and to repeat it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from loadtest.load import Request
from loadtest.machine import Code, Hardware
from loadtest.process import ServerUse
from loadtest.stats import Slo, Summary, histogram, summarize

SCHEMA_VERSION = 1  # raised when a reader of older files would misread a newer one


class BadResult(Exception):
    """A file that is not a result of this schema; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds from the first request of the run, rounded to 1 µs."""

    due_s: float
    sent_s: float
    ended_s: float
    ttft_s: float | None
    tpot_s: float | None
    output_tokens: int
    output_events: int
    prompt_tokens: int | None
    cached_tokens: int | None
    prefix: int
    finish_reason: str | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat. `itl_histogram` holds every gap between text events in the buckets of `stats.histogram`."""

    seed: int
    started: str  # ISO 8601, UTC
    summary: Summary
    client_cpu_s: float
    server_use: ServerUse | None
    itl_histogram: Mapping[str, int]
    requests: list[Row]


@dataclass(frozen=True, slots=True)
class Result:
    """All repeats of one configuration."""

    schema_version: int
    label: str
    command: list[str]
    code: Code
    hardware: Hardware
    versions: Mapping[str, str]
    server: Mapping[str, Any]
    config: Mapping[str, Any]
    seed: int
    warmup_failures: Mapping[str, int]
    runs: list[Run]


def make_run(
    seed: int,
    started: str,
    requests: Sequence[Request],
    client_cpu_s: float,
    server_use: ServerUse | None,
    slo: Slo | None = None,
) -> Run:
    """The record of at least one request; rows are in the order of sending."""
    ordered = sorted(requests, key=lambda request: request.outcome.sent_at)
    start = ordered[0].outcome.sent_at
    return Run(
        seed=seed,
        started=started,
        summary=summarize(ordered, slo),
        client_cpu_s=round(client_cpu_s, 3),
        server_use=server_use,
        itl_histogram=histogram(gap for r in ordered if r.outcome.failure is None for gap in r.outcome.itl_s),
        requests=[_row(request, start) for request in ordered],
    )


def _row(request: Request, start: float) -> Row:
    outcome = request.outcome
    return Row(
        due_s=round(request.due_at - start, 6),
        sent_s=round(outcome.sent_at - start, 6),
        ended_s=round(outcome.ended_at - start, 6),
        ttft_s=None if outcome.ttft_s is None else round(outcome.ttft_s, 6),
        tpot_s=None if outcome.tpot_s is None else round(outcome.tpot_s, 6),
        output_tokens=outcome.num_tokens,
        output_events=outcome.num_events,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        prefix=request.prompt.prefix_index,
        finish_reason=outcome.finish_reason,
        failure=None if outcome.failure is None else outcome.failure.key,
    )


def to_json(result: Result) -> dict[str, Any]:
    """The document as it is written and as `report` reads it."""
    document: dict[str, Any] = orjson.loads(orjson.dumps(asdict(result)))
    return document


def write_result(document: Mapping[str, Any], path: Path) -> None:
    """One line a key, one a run and one a request, so that a diff and an eye can use it."""
    head = {key: value for key, value in document.items() if key != "runs"}
    runs = []
    for run in document["runs"]:
        body = {key: value for key, value in run.items() if key != "requests"}
        rows = b",\n".join(map(orjson.dumps, run["requests"]))
        runs.append(orjson.dumps(body)[:-1] + b',"requests":[\n' + rows + b"\n]}")
    text = orjson.dumps(head, option=orjson.OPT_INDENT_2)
    path.write_bytes(text[:-2] + b',\n  "runs": [\n' + b",\n".join(runs) + b"\n]}\n")


def read_result(path: Path) -> dict[str, Any]:
    """Raises BadResult for a file that is not JSON, or not of this schema."""
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadResult(f"{path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise BadResult(f"{path}: not JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise BadResult(f"{path}: schema_version {version!r}, need {SCHEMA_VERSION}: measure again with this version")
    assert isinstance(document, dict)
    return document
