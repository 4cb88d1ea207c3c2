"""Command line: `sluicegate bench ...` and `python -m loadtest ...` are the same."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from typing import Any

import uvloop

from loadtest import trials
from loadtest.arguments import json_object, natural, positive, positive_int, share
from loadtest.bench import BenchConfig, BenchError, bench
from loadtest.client import Endpoint
from loadtest.load import ClosedLoop, Limits, Load, OpenLoop
from loadtest.report import draw, markdown
from loadtest.result import BadResult, read_result, to_json, write_result
from loadtest.servers import ServerFailed, TrialError
from loadtest.stats import Slo
from loadtest.workload import WORKLOADS, Workload

DEFAULT_RATE = 1.0
DEFAULT_NUM_REQUESTS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `argv` begins with, `run` if it begins with none; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in _COMMANDS else "run"
    try:
        return _COMMANDS[command](arguments)
    except (BenchError, BadResult, TrialError, ServerFailed, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted, nothing is written", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    """0 if at least one request succeeded: under overload, failures are a measurement."""
    parser = _run_parser()
    options = parser.parse_args(arguments)
    if options.concurrency is not None and _workload(options).burst_size > 1:
        parser.error("argument --concurrency: bursts need an open loop: give --rate, or --burst-size 1")
    path = options.output or Path(f"bench-{options.workload}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    if path.exists():
        parser.error(f"argument --output: {path} exists, and a result is never overwritten: name another file")
    config = _config(options)
    command = ["sluicegate", "bench", *_without_key(arguments)]
    document = to_json(uvloop.run(bench(config, options.api_key, command)))
    write_result(document, path)
    print(markdown({config.label: document}) + f"\nWritten to {path}")
    return 0 if any(run["summary"]["num_ok"] for run in document["runs"]) else 1


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sluicegate bench report", description="Draw results: table and plots.")
    parser.add_argument("results", nargs="+", type=Path, metavar="JSON", help="files that `bench` wrote")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.md and the plots there")
    options = parser.parse_args(arguments)
    documents: dict[str, dict[str, Any]] = {}
    for path in options.results:
        document = read_result(path)
        name = document["label"]
        documents[name if name not in documents else str(path)] = document
    table = markdown(documents)
    print(table, end="")
    if options.out is not None:
        plots = draw(documents, options.out)
        images = "\n".join(f"![{plot.stem}]({plot.name})" for plot in plots)
        (options.out / "report.md").write_text(f"{table}\n{images}\n")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "report": _report,
    "kill": trials.kill,
    "soak": trials.soak,
    "gateway": trials.gateway,
    "gpu": trials.gpu,
    "load": trials.load,
}


def _config(options: argparse.Namespace) -> BenchConfig:
    workload = _workload(options)
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = DEFAULT_NUM_REQUESTS
    return BenchConfig(
        url=options.url,
        model=options.model,
        endpoint=options.endpoint,
        workload=workload,
        load=_load(options, workload),
        limits=Limits(num_requests, options.duration),
        repeats=options.repeats,
        warmup=options.warmup,
        seed=SystemRandom().randrange(1, 2**31) if options.seed is None else options.seed,
        ignore_eos=options.ignore_eos,
        extra_body=options.extra_body,
        timeout_s=options.timeout,
        keep_alive=options.keep_alive,
        server_pids=tuple(options.server_pid),
        label=options.label or workload.name,
        slo=_slo(options),
    )


def _slo(options: argparse.Namespace) -> Slo | None:
    if options.slo_ttft_ms is None and options.slo_itl_ms is None:
        return None
    ttft_s, itl_s = (None if ms is None else ms / 1000 for ms in (options.slo_ttft_ms, options.slo_itl_ms))
    return Slo(ttft_s, itl_s)


def _workload(options: argparse.Namespace) -> Workload:
    workload = WORKLOADS[options.workload]
    fields = ("prompt_tokens", "output_tokens", "spread", "prefix_tokens", "num_prefixes", "burst_size")
    given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
    return replace(workload, **given)


def _load(options: argparse.Namespace, workload: Workload) -> Load:
    if options.concurrency is None:
        return OpenLoop(DEFAULT_RATE if options.rate is None else options.rate, workload.burst_size)
    return ClosedLoop(options.concurrency)


def _without_key(arguments: Sequence[str]) -> list[str]:
    """The command as it may be written into a file that is shown around."""
    shown = list(arguments)
    for position, argument in enumerate(shown):
        if argument.startswith("--api-key="):
            shown[position] = "--api-key=***"
        elif argument == "--api-key" and position + 1 < len(shown):
            shown[position + 1] = "***"
    return shown


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluicegate bench",
        description="Load any OpenAI-compatible server and measure it. `sluicegate bench report` draws the results.",
        allow_abbrev=False,  # else an abbreviated --api-key would reach the result
    )
    parser.add_argument("--url", required=True, help="the server's root, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument(
        "--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.CHAT, help="default: chat"
    )
    parser.add_argument("--api-key", help="sent as a bearer token, never written down")
    _add_workload_options(parser)
    _add_load_options(parser)
    _add_request_options(parser)
    parser.add_argument(
        "--server-pid",
        type=positive_int,
        action="append",
        default=[],
        metavar="PID",
        help=("record processor time and memory of this local process and its children; repeatable"),
    )
    parser.add_argument(
        "--slo-ttft-ms", type=positive, metavar="MS", help="goodput counts requests whose TTFT is at most this"
    )
    parser.add_argument(
        "--slo-itl-ms",
        type=positive,
        metavar="MS",
        help="goodput counts requests whose gaps between text events are at most this, all but the longest hundredth",
    )
    parser.add_argument("--label", help="name of the row in reports; default: the workload")
    parser.add_argument("--output", type=Path, metavar="JSON", help="default: bench-LABEL-TIME.json")
    return parser


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked", "Sizes in tokens; defaults come from the workload.")
    group.add_argument("--workload", choices=list(WORKLOADS), default="chat", help="default: chat")
    group.add_argument("--prompt-tokens", type=positive_int, metavar="N", help="mean, without the shared prefix")
    group.add_argument("--output-tokens", type=positive_int, metavar="N", help="mean")
    group.add_argument("--spread", type=share, metavar="S", help="sizes are even in mean · (1 ± S), 0 ≤ S < 1")
    group.add_argument("--prefix-tokens", type=natural, metavar="N", help="length of the shared prefix")
    group.add_argument("--num-prefixes", type=positive_int, metavar="N", help="different prefixes, taken in turn")
    group.add_argument(
        "--seed",
        type=int,
        help=("of prompts and arrivals; default: drawn and recorded, so that a second run meets no cache of the first"),
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when")
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help=(f"open loop: requests per second on average, Poisson; default: {DEFAULT_RATE:g}"),
    )
    loop.add_argument("--concurrency", type=positive_int, metavar="N", help="closed loop: requests at a time")
    group.add_argument("--burst-size", type=positive_int, metavar="N", help="open loop: so many arrive at once")
    group.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=(f"per repeat; default: {DEFAULT_NUM_REQUESTS}, without limit if --duration is given"),
    )
    group.add_argument("--duration", type=positive, metavar="S", help="no new requests after so many seconds")
    group.add_argument("--repeats", type=positive_int, default=1, metavar="N", help="runs, each with its own seed")
    group.add_argument(
        "--warmup",
        type=natural,
        default=4,
        metavar="N",
        help=("unmeasured requests before the first run, all at once; default: 4"),
    )


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=("ask for outputs of full length, if the server knows the field"),
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="merged into each request")
    group.add_argument("--timeout", type=positive, default=300.0, metavar="S", help="of one request; default: 300")
    group.add_argument(
        "--keep-alive", action=argparse.BooleanOptionalAction, default=True, help=("use connections again")
    )


if __name__ == "__main__":
    sys.exit(main())
