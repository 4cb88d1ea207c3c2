"""The commands `kill`, `soak`, `gateway`, `gpu`, `load`: options to a trial, its report to a file and the terminal."""

import argparse
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import SystemRandom
from typing import Any

import orjson
import uvloop

from loadtest import chaos, gateway_report, gpu_report, loading
from loadtest import gateway as fronting
from loadtest import gpu as computing
from loadtest import soak as soaking
from loadtest.arguments import natural, positive, positive_int, share

#: An engine without a model whose streams last long enough to be hit.
_DEFAULT_ENGINE = ("--backend=fake", "--fake-step-ms=2")
#: An engine that leaves two processors room to spare when it is full, and whose blocks are soon all in use.
_DEFAULT_SOAKED = ("--backend=fake", "--fake-step-ms=40", "--fake-num-blocks=512", "--max-num-seqs=16")


def kill(arguments: Sequence[str]) -> int:
    """0 if every answer was that of an undisturbed run and every dead gateway's blocks were freed, else 1."""
    parser = _parser(
        "kill",
        "Kill an engine at random tokens of many requests, and compare their answers with those of undisturbed runs.",
    )
    parser.add_argument("--kills", type=natural, default=100, metavar="N", help="SIGKILLs of the engine; default: 100")
    parser.add_argument("--stops", type=natural, default=0, metavar="N", help="SIGSTOPs of the engine; default: 0")
    parser.add_argument(
        "--stop-seconds", type=positive, default=15.0, metavar="S", help="SIGCONT after so long; default: 15"
    )
    parser.add_argument(
        "--gateway-kills", type=natural, default=0, metavar="N", help="SIGKILLs of the gateway; default: 0"
    )
    parser.add_argument("--cases", type=positive_int, default=60, metavar="N", help="different requests; default: 60")
    parser.add_argument(
        "--width", type=positive_int, default=6, metavar="N", help="requests on their way at a kill; default: 6"
    )
    options = parser.parse_args(arguments)
    config = chaos.ChaosConfig(
        engine_flags=tuple(options.engine) or _DEFAULT_ENGINE,
        gateway_flags=tuple(options.gateway_flag),
        engine_kills=options.kills,
        engine_stops=options.stops,
        gateway_kills=options.gateway_kills,
        stop_s=options.stop_seconds,
        num_cases=options.cases,
        width=options.width,
        seed=_seed(options),
    )
    report = _run(chaos.chaos(config, ["python", "-m", "loadtest", "kill", *arguments]), options)
    _show(chaos.table(report) + f"\nSeed {config.seed}.")
    return 1 if report.num_different else 0


def soak(arguments: Sequence[str]) -> int:
    """0 if no request failed, no block was lost and no process grew, else 1."""
    parser = _parser(
        "soak", "Load an engine and a gateway for long, with clients that leave; memory and blocks must stay."
    )
    parser.add_argument("--duration", type=positive, default=600.0, metavar="S", help="default: 600")
    parser.add_argument("--load", type=share, default=0.8, metavar="F", help="share of the capacity; default: 0.8")
    parser.add_argument("--leaving", type=share, default=0.1, metavar="F", help="share that leaves; default: 0.1")
    parser.add_argument("--output-tokens", type=positive_int, default=60, metavar="N", help="mean; default: 60")
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        default=24,
        metavar="N",
        help="requests at a time while the capacity is measured, more than the engine runs; default: 24",
    )
    options = parser.parse_args(arguments)
    config = soaking.SoakConfig(
        engine_flags=tuple(options.engine) or _DEFAULT_SOAKED,
        gateway_flags=tuple(options.gateway_flag),
        duration_s=options.duration,
        load=options.load,
        leaving=options.leaving,
        output_tokens=options.output_tokens,
        concurrency=options.concurrency,
        seed=_seed(options),
    )
    report = _run(soaking.soak(config, ["python", "-m", "loadtest", "soak", *arguments]), options)
    _show(soaking.table(report))
    return 0 if report.passed else 1


def gateway(arguments: Sequence[str]) -> int:
    """0 if every paced stream got an event for each token, else 1; a missed target is a measurement."""
    plan = fronting.Plan()
    parser = argparse.ArgumentParser(
        prog="python -m loadtest gateway",
        description="Measure what a gateway costs: one process before the fake engine, streams at a fixed pace.",
        allow_abbrev=False,
    )
    for name, default, text in (
        ("streams", plan.streams, "streams whose cost is measured"),
        ("latency-streams", plan.latency_streams, "streams whose delay is measured"),
        ("full-speed-streams", plan.full_speed_streams, "streams of an engine without a pace"),
        ("tokens", plan.num_tokens, "tokens of each stream"),
        ("first-writes", plan.first_writes, "requests whose first event is timed"),
        ("repeats", plan.repeats, "runs, each with processes of its own"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    parser.add_argument(
        "--rate", type=positive, default=plan.rate, metavar="R", help="tokens a second of each stream; default: 40"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the report there, its table and plot beside")
    options = parser.parse_args(arguments)
    plan = fronting.Plan(
        streams=options.streams,
        rate=options.rate,
        num_tokens=options.tokens,
        latency_streams=options.latency_streams,
        full_speed_streams=options.full_speed_streams,
        first_writes=options.first_writes,
        repeats=options.repeats,
    )
    command = ["python", "-m", "loadtest", "gateway", *arguments]
    report = _run(fronting.measure(plan, command, _tell), options)
    table = gateway_report.table(report)
    _show(table)
    if options.output is not None:
        plot = gateway_report.draw(report, options.output.with_suffix(".png"))
        options.output.with_suffix(".md").write_text(f"{table}\n![{plot.stem}]({plot.name})\n")
    return 1 if report.has_joined_tokens else 0


def gpu(arguments: Sequence[str]) -> int:
    """0 once everything is measured, where a missed target is a measurement; 1 if a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest gpu",
        description="Measure decoding, prefill, throughput, HTTP and start-up of two models on this machine's GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--repeats", type=positive_int, default=computing.FULL.repeats, metavar="N", help="default: 3")
    parser.add_argument("--http", action=argparse.BooleanOptionalAction, default=True, help="HTTP and starts, too")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the report there, its table and plot beside")
    options = parser.parse_args(arguments)
    plan = replace(computing.FULL, repeats=options.repeats, http=computing.FULL.http if options.http else ())
    command = ["python", "-m", "loadtest", "gpu", *arguments]

    def keep(report: computing.Report) -> None:
        if options.output is not None:
            options.output.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2) + b"\n")

    report = computing.measure(plan, command, _tell, keep)
    table = gpu_report.table(report)
    _show(table)
    if options.output is not None:
        plot = gpu_report.draw(report, options.output.with_suffix(".png"))
        text = f"{table}\n![{plot.stem}]({plot.name})\n{gpu_report.profiles(report)}"
        options.output.with_suffix(".md").write_text(text)
    return 1 if report.failures else 0


def load(arguments: Sequence[str]) -> int:
    """0 once everything is measured; a missed target is a measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest load",
        description="Measure how fast an engine loads a model, beside the disk, and the memory that it takes.",
        epilog="Give the model's folder and the engine's flags after `--`, such as `-- /models/llama --device=cpu`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="DIR", help="a folder with safetensors, on the disk to measure")
    parser.add_argument("engine", nargs="*", metavar="FLAG", help="words of the engine's command line")
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the report there")
    options = parser.parse_args(arguments)
    command = ["python", "-m", "loadtest", "load", *arguments]
    report = loading.measure(options.model, options.engine, options.repeats, command, _tell)
    _show(loading.table(report))
    if options.output is not None:
        options.output.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2) + b"\n")
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m loadtest {name}",
        description=description,
        epilog="Give the engine's flags after `--`, such as `-- MODEL --dtype=float32`; default: the fake backend.",
        allow_abbrev=False,
    )
    parser.add_argument("engine", nargs="*", metavar="FLAG", help="words of the engine's command line")
    parser.add_argument(
        "--gateway-flag", action="append", default=[], metavar="FLAG", help="of the gateway's; repeatable"
    )
    parser.add_argument("--seed", type=int, help="of requests and moments; default: drawn, and told")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the report there")
    return parser


def _seed(options: argparse.Namespace) -> int:
    return SystemRandom().randrange(2**31) if options.seed is None else options.seed


def _run(trial: Coroutine[Any, Any, Any], options: argparse.Namespace) -> Any:
    report = uvloop.run(trial)
    if options.output is not None:
        options.output.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2) + b"\n")
    return report


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
