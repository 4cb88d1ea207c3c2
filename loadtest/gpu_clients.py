"""Streaming clients in a closed loop, some in each of several processes: one alone is slower than two gateways.

Prompts are random ids, greedy, the end of sequence ignored. Prints one JSON object: `Level`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import uvloop

from loadtest.bench import raise_file_limit
from loadtest.client import Endpoint, Outcome, exchange
from loadtest.transport import HttpClient

_TIMEOUT_S = 120.0
_LEAST_ID = 1000


@dataclass(frozen=True, slots=True)
class Level:
    """Times are seconds; `began` and `ended` of this machine's monotonic clock, so that processes can be joined."""

    began: float
    ended: float
    num_tokens: int
    num_events: int
    ttft_s: list[float]
    itl_s: list[float]


async def run(options: argparse.Namespace) -> Level:
    """Raises ValueError for an answer that is not whole."""
    ids = random.Random(options.seed)
    left = iter(range(options.requests))
    outcomes: list[Outcome] = []

    def body() -> bytes:
        return orjson.dumps(
            {
                "model": options.model,
                "prompt": [ids.randrange(_LEAST_ID, options.vocab) for _ in range(options.prompt_tokens)],
                "max_tokens": options.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    async with HttpClient(options.url) as client:

        async def work() -> None:
            for _ in left:
                outcome = await exchange(client, Endpoint.COMPLETIONS, body(), _TIMEOUT_S)
                if outcome.failure is not None or outcome.num_tokens != options.output_tokens:
                    raise ValueError(f"{outcome.num_tokens} of {options.output_tokens} tokens; {outcome.failure}")
                outcomes.append(outcome)

        await asyncio.sleep(max(0.0, options.at - time.monotonic()))
        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(options.clients)))
        ended = time.monotonic()
    return Level(
        began=began,
        ended=ended,
        num_tokens=sum(outcome.num_tokens for outcome in outcomes),
        num_events=sum(outcome.num_events for outcome in outcomes),
        ttft_s=[ttft for outcome in outcomes if (ttft := outcome.ttft_s) is not None],
        itl_s=[gap for outcome in outcomes for gap in outcome.itl_s],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_clients", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--at", type=float, required=True, help="second of the monotonic clock at which to begin")
    for name in ("vocab", "clients", "requests", "prompt-tokens", "output-tokens", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(argv)
    raise_file_limit()
    sys.stdout.buffer.write(orjson.dumps(uvloop.run(run(options))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
