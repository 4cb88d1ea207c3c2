"""Coverage-guided fuzzing of the wire's decoders, by atheris: `python -m tests.fuzz.guided --seconds 60`.

libFuzzer takes the process over and ends it: with status 0 when the time is up, with another for whatever is no
WireError, whose frame it then writes to the current folder.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["protocol"]):
    from tests.fuzz.frames import DECODERS, ENGINE_FRAMES, GATEWAY_FRAMES, outcome

#: Longer frames have no other parts than these.
MAX_FRAME_BYTES = 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as corpus:
        for number, frame in enumerate(GATEWAY_FRAMES + ENGINE_FRAMES):
            (Path(corpus) / str(number)).write_bytes(frame)
        limits = [f"-max_total_time={seconds}", f"-max_len={MAX_FRAME_BYTES}", "-rss_limit_mb=1024", "-timeout=5"]
        atheris.Setup(["guided", *limits, corpus], _one)
        atheris.Fuzz()


def _one(frame: bytes) -> None:
    for decode in DECODERS.values():
        outcome(decode, frame)


if __name__ == "__main__":
    main()
