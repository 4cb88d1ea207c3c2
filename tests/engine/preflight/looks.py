"""What a look at a folder is asked for in tests, and what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.report import Report
from engine.preflight.wanted import Wanted

GPU = Device("cuda", "GPU", 80 * 2**30)
WANTED = Wanted(
    device=GPU,
    backend="auto",
    dtype="auto",
    load_format="auto",
    max_model_len=None,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    block_size=16,
    kv_cache_memory_bytes=None,
    gpu_memory_utilization=0.92,
)


def problems(folder: Path, **wanted: object) -> list[str]:
    return [str(problem) for problem in check(folder, replace(WANTED, **wanted)).problems]  # type: ignore[arg-type]


def facts(report: Report) -> dict[str, str]:
    return {fact.about: fact.text for fact in report.facts}
