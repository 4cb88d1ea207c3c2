"""The whole of the fuzzing, by hand: `python -m tests.fuzz frames` and `python -m tests.fuzz bodies --url URL`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from random import SystemRandom

from tests.fuzz import bodies, frames


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("frames", "bodies"))
    parser.add_argument("--count", type=int, help="default: 1,000,000 frames or 10,000 bodies")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**31))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a gateway, for bodies")
    options = parser.parse_args()
    started = time.monotonic()
    if options.what == "frames":
        fuzzed: object = frames.fuzz(options.seed, options.count or 1_000_000)
        faults: list[str] = []
    else:
        answered = asyncio.run(bodies.fuzz(options.url, options.seed, options.count or 10_000))
        fuzzed, faults = answered, answered.faults
    sys.stdout.write(f"seed {options.seed}, {time.monotonic() - started:.1f} s: {fuzzed}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
