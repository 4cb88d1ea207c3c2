"""The commands `kill` and `soak`: options to a trial, its report to a file and the terminal."""

import argparse
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from random import SystemRandom
from typing import Any

import orjson
import uvloop

from loadtest import chaos
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
