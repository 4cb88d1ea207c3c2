"""How fast an engine loads a model, beside what the disk gives, and how much memory that takes.

An engine is started for each repeat, by its command line, with nothing of the weights in the page cache; its log says
how long they took. Before each start the same files are read as `dd bs=1M` would, from the same empty cache.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from loadtest.machine import Code, Hardware, read_code, read_hardware, read_versions
from loadtest.process import ServerUse, take_snapshot, use_between
from loadtest.servers import Program, ServerFailed, TrialError

#: The share of the disk's rate that loading is to reach.
TARGET = 0.8

_BLOCK_BYTES = 2**20
_START_TIMEOUT_S = 1800.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Repeat:
    """`dd_s` are for reading the files, `load_s` from the first weight to the last, `start_s` up to where it serves;
    `use` is the engine's in that time, of which `others_share` tells whether rates may be compared.
    """

    dd_s: float
    load_s: float
    start_s: float
    use: ServerUse

    @property
    def share(self) -> float:
        """Of the disk's rate."""
        return self.dd_s / self.load_s


@dataclass(frozen=True, slots=True)
class Report:
    command: list[str]
    code: Code
    hardware: Hardware
    versions: dict[str, str]
    weight_bytes: int
    largest_file_bytes: int
    repeats: list[Repeat]

    @property
    def share(self) -> float:
        """Of the disk's rate: the median over the repeats."""
        return median(repeat.share for repeat in self.repeats)


def measure(model: Path, flags: Sequence[str], repeats: int, command: list[str], tell: Callable[[str], None]) -> Report:
    """`flags` are the engine's. Raises TrialError, and ServerFailed when the engine does not serve."""
    files = sorted(file for file in model.glob("*.safetensors"))
    if not files:
        raise TrialError(f"{model} has no *.safetensors; name the folder of a model")
    found = []
    for number in range(repeats):
        tell(f"repeat {number + 1} of {repeats}")
        dd_s = _read_all(files)
        found.append(_load(model, files, flags, dd_s))
    sizes = [file.stat().st_size for file in files]
    return Report(command, read_code(), read_hardware(), read_versions(), sum(sizes), max(sizes), found)


def table(report: Report) -> str:
    lines = [
        "| dd | load | share | start | processor time | others' share | peak over resident |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in report.repeats:
        dd, load = (report.weight_bytes / 1e6 / seconds for seconds in (one.dd_s, one.load_s))
        (process,) = one.use.processes
        lines.append(
            f"| {dd:.0f} MB/s | {load:.0f} MB/s | {one.share:.2f} | {one.start_s:.1f} s | {one.use.cpu_s:.1f} s "
            f"| {one.use.others_share:.2f} | {process.memory_mib.peak_rss - process.memory_mib.rss:.0f} MiB |"
        )
    return "\n".join(lines) + (
        f"\n\nMedian share of the disk's rate: {report.share:.2f} (target {TARGET}); the largest file has "
        f"{report.largest_file_bytes / 2**20:.0f} MiB.\n"
    )


def _read_all(files: Sequence[Path]) -> float:
    """Seconds to read the files from the disk."""
    _forget(files)
    block = bytearray(_BLOCK_BYTES)
    began = time.monotonic()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass
    return time.monotonic() - began


def _forget(files: Sequence[Path]) -> None:
    """Out of the page cache; what was just written has to be on the disk for that."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(model: Path, files: Sequence[Path], flags: Sequence[str], dd_s: float) -> Repeat:
    folder = Path(tempfile.mkdtemp(prefix="sg-"))
    engine = Program(
        ["engine", str(model), f"--listen=ipc://{folder}/engine.sock", "--log-format=json", *flags], folder / "log"
    )
    try:
        with closing(engine):
            _forget(files)
            before, began = take_snapshot([]), time.monotonic()
            engine.start()
            loaded = _events_until(engine, "engine_serving")["weights_loaded"]
            start_s = time.monotonic() - began
            use = use_between(before, take_snapshot([engine.pid]))
            return Repeat(dd_s, float(loaded["seconds"]), start_s, use)
    finally:
        shutil.rmtree(folder)


def _events_until(engine: Program, last: str) -> dict[str, dict[str, Any]]:
    """Lines of the engine's log by their events. Raises ServerFailed when the last does not come."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        lines = engine.log.read_bytes().splitlines()
        events = {line["event"]: line for line in map(orjson.loads, lines) if "event" in line}
        if last in events:
            return events
        engine.check()
        time.sleep(_POLL_S)
    raise ServerFailed(engine.describe(f"it does not serve after {_START_TIMEOUT_S:g} s"))
