"""One measurement from end to end: ask the server what it is, warm it up, load it, and keep all that was seen."""

import itertools
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from tqdm import tqdm

from loadtest.client import Endpoint, FailureKind, Outcome, Target, complete
from loadtest.load import ClosedLoop, Limits, Load, OpenLoop, Request, run_closed, run_open
from loadtest.machine import read_code, read_hardware, read_versions
from loadtest.process import take_snapshot, use_between
from loadtest.result import SCHEMA_VERSION, Result, Run, make_run
from loadtest.stats import Slo
from loadtest.transport import BadResponse, ConnectionLost, HttpClient
from loadtest.workload import Prompt, Workload, arrivals, prompts

WARMUP_OUTPUT_TOKENS = 16


class BenchError(Exception):
    """The server cannot be measured; the text says what it answered."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure; everything but the API key is kept in the result."""

    url: str
    model: str | None  # None: the first that the server lists
    endpoint: Endpoint
    workload: Workload
    load: Load
    limits: Limits
    repeats: int
    warmup: int  # requests before the first run, all at once
    seed: int
    ignore_eos: bool  # ask for outputs of full length, where the server knows the field
    extra_body: Mapping[str, Any]
    timeout_s: float
    keep_alive: bool
    server_pids: tuple[int, ...]
    label: str
    slo: Slo | None = None


async def bench(config: BenchConfig, api_key: str | None, command: list[str]) -> Result:
    """Runs the whole measurement. Raises BenchError if the server cannot be asked at all."""
    raise_file_limit()
    try:
        http_client = HttpClient(config.url, api_key=api_key, keep_alive=config.keep_alive)
    except ValueError as error:
        raise BenchError(str(error)) from error
    async with http_client as client:
        model = config.model or await _first_model(client)
        target = await _probe(client, config, model)
        warmup_failures = await _warm_up(client, target, config)
        runs = [await _run_once(client, target, config, repeat) for repeat in range(config.repeats)]
        server = {"model": model, "version": await _version(client)}
    return Result(
        schema_version=SCHEMA_VERSION,
        label=config.label,
        command=command,
        code=read_code(),
        hardware=read_hardware(),
        versions=read_versions(),
        server=server | {"ignore_eos_sent": target.ignore_eos, "usage_asked": target.include_usage},
        config=asdict(config) | {"loop": "open" if isinstance(config.load, OpenLoop) else "closed"},
        seed=config.seed,
        warmup_failures=warmup_failures,
        runs=runs,
    )


def raise_file_limit() -> None:
    """To what the system allows: a stream is a file, and the usual limit of 1024 would show as failed connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _first_model(client: HttpClient) -> str:
    try:
        body = await client.get("/v1/models")
    except (OSError, ConnectionLost, BadResponse) as error:
        raise BenchError(f"GET /v1/models: {error}: is the server up, and is --url its root?") from error
    try:
        return str(orjson.loads(body.data)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise BenchError(f"GET /v1/models: status {body.status} lists no model: name one with --model") from error


async def _version(client: HttpClient) -> Any:
    """What the server says of itself, by vLLM's convention; None if it says nothing."""
    try:
        body = await client.get("/version")
        return orjson.loads(body.data) if body.status == 200 else None
    except (OSError, ConnectionLost, BadResponse, orjson.JSONDecodeError):
        return None


async def _probe(client: HttpClient, config: BenchConfig, model: str) -> Target:
    """The richest request that the server accepts: some refuse `ignore_eos` or `stream_options` as unknown."""
    prompt = Prompt(prefix="", prefix_index=0, text="time", output_tokens=2)
    ignoring = (True, False) if config.ignore_eos else (False,)
    refusals = []
    for include_usage, ignore_eos in itertools.product((True, False), ignoring):
        target = Target(model, config.endpoint, ignore_eos, include_usage, config.extra_body, config.timeout_s)
        failure = (await complete(client, target, prompt)).failure
        if failure is None or failure.kind is FailureKind.NO_TEXT:
            return target
        refusals.append(f"{failure.key}: {failure.detail}")
        if failure.status not in (400, 422):
            break
    raise BenchError(f"POST {config.endpoint.path}: {refusals[-1]}")


async def _warm_up(client: HttpClient, target: Target, config: BenchConfig) -> dict[str, int]:
    """Failures by kind. The seed is one that no run has, so that no run finds its prompts in a cache."""
    if config.warmup == 0:
        return {}
    workload = replace(config.workload, output_tokens=min(WARMUP_OUTPUT_TOKENS, config.workload.output_tokens))
    requests = await run_closed(
        lambda prompt: complete(client, target, prompt),
        prompts(workload, config.seed - 1),
        config.warmup,
        Limits(config.warmup, None),
        lambda request: None,
    )
    return dict(Counter(_failure_keys(requests)))


async def _run_once(client: HttpClient, target: Target, config: BenchConfig, repeat: int) -> Run:
    seed, limits = config.seed + repeat, config.limits
    asked = prompts(config.workload, seed)
    started = datetime.now(UTC).isoformat(timespec="seconds")

    async def send(prompt: Prompt) -> Outcome:
        return await complete(client, target, prompt)

    before = take_snapshot(config.server_pids)
    with _Progress(f"{config.workload.name} {repeat + 1}/{config.repeats}", limits.num_requests) as progress:
        cpu_before_s = time.process_time()
        match config.load:
            case OpenLoop(rate, burst_size):
                times = arrivals(rate, burst_size, seed)
                requests = await run_open(send, asked, times, limits, progress.add)
            case ClosedLoop(concurrency):
                requests = await run_closed(send, asked, concurrency, limits, progress.add)
        client_cpu_s = time.process_time() - cpu_before_s
    server_use = use_between(before, take_snapshot(config.server_pids)) if config.server_pids else None
    return make_run(seed, started, requests, client_cpu_s, server_use, config.slo)


def _failure_keys(requests: Iterable[Request]) -> list[str]:
    return [request.outcome.failure.key for request in requests if request.outcome.failure is not None]


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, title: str, total: int | None) -> None:
        self._bar = tqdm(total=total, desc=title, unit="req", disable=None, leave=False)
        self._num_failed = 0
        self._num_tokens = 0
        self._start = time.perf_counter()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, request: Request) -> None:
        outcome = request.outcome
        self._num_failed += outcome.failure is not None
        self._num_tokens += outcome.num_tokens
        rate = self._num_tokens / (time.perf_counter() - self._start)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s, {self._num_failed} failed", refresh=False)
        self._bar.update()
