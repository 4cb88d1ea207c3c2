"""The table of metrics and what `/metrics` shows of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protocol import metrics
from protocol.metrics import PREFIX, TABLE, Metric, Owner, Type

ROOT = Path(__file__).parents[2]


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


@pytest.mark.parametrize("owner", list(Owner))
def test_a_program_has_the_rows_it_owns_and_no_other(owner: Owner) -> None:
    registry = CollectorRegistry()
    instruments = metrics.build(owner, registry)
    getters = {
        Type.COUNTER: instruments.counter,
        Type.GAUGE: instruments.gauge,
        Type.HISTOGRAM: instruments.histogram,
    }
    for row in TABLE:
        getter = instruments.tallied if row.is_tallied else getters[row.type]
        if row.owner is owner:
            getter(row.name)
        else:
            with pytest.raises(KeyError):
                getter(row.name)


def test_names_are_the_tables_on_the_page() -> None:
    registry = CollectorRegistry()
    instruments = metrics.build(Owner.ENGINE, registry)
    instruments.counter("num_preemptions_total").labels(model_name="m").inc(2)
    instruments.gauge("num_requests_running").labels(model_name="m").set(3)
    instruments.histogram("iteration_tokens_total").labels(model_name="m").observe(7)
    shown = samples(metrics.exposition(registry))
    model = ("model_name", "m")
    assert shown[f"{PREFIX}num_preemptions_total", (model,)] == 2
    assert shown[f"{PREFIX}num_requests_running", (model,)] == 3
    assert shown[f"{PREFIX}iteration_tokens_total_sum", (model,)] == 7
    assert shown[f"{PREFIX}iteration_tokens_total_bucket", (("le", "1.0"), model)] == 0
    assert shown[f"{PREFIX}iteration_tokens_total_bucket", (("le", "8.0"), model)] == 1
    assert not [name for name, _ in shown if name.endswith("_created")]
    assert ("process_resident_memory_bytes", ()) in shown


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_rows_keep_prometheus_rules(row: Metric) -> None:
    assert row.help.endswith(".")
    assert (row.type is Type.HISTOGRAM) == bool(row.buckets)
    assert list(row.buckets) == sorted(set(row.buckets))
    if row.type is Type.COUNTER:
        assert row.name.endswith("_total")
    assert [other.name for other in TABLE].count(row.name) == 1


def test_workers_add_up_and_agree_on_gauges(tmp_path: Path) -> None:
    worker = """
import time
from prometheus_client import CollectorRegistry
from protocol import metrics, tally
instruments = metrics.build(metrics.Owner.GATEWAY, CollectorRegistry())
instruments.counter("request_errors_total").labels(status="429").inc(2)
instruments.gauge("engines_serving").set(3)
instruments.histogram("request_prompt_tokens").labels(model_name="m").observe(10)
gaps = instruments.tallied("inter_token_latency_seconds").labels("m")
clock = iter((0.0, 0.004, 0.008, 3.008))
tally.time.perf_counter = lambda: next(clock)
watch = tally.Stopwatch()
for _ in range(4):
    gaps.lap(watch)
gaps.flush()
print("done", flush=True)
time.sleep(60)
"""
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen([sys.executable, "-c", worker], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for process in workers:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        shown = samples(metrics.exposition(CollectorRegistry(), str(tmp_path)))
    finally:
        for process in workers:
            process.kill()
            process.communicate()
    assert shown[f"{PREFIX}request_errors_total", (("status", "429"),)] == 4
    assert shown[f"{PREFIX}engines_serving", ()] == 3
    assert shown[f"{PREFIX}request_prompt_tokens_sum", (("model_name", "m"),)] == 20
    gaps = f"{PREFIX}inter_token_latency_seconds"
    model = ("model_name", "m")
    assert shown[f"{gaps}_count", (model,)] == 6
    assert shown[f"{gaps}_sum", (model,)] == pytest.approx(6.016)
    at_most = {bound: shown[f"{gaps}_bucket", (("le", bound), model)] for bound in ("0.002", "0.005", "2.5", "10.0")}
    assert at_most == {"0.002": 0, "0.005": 4, "2.5": 4, "10.0": 6}


def test_the_markdown_table_has_every_row() -> None:
    lines = metrics.markdown_table().splitlines()
    assert len(lines) == len(TABLE) + 2
    assert (
        "| `sluicegate:resumes_total` | gateway | counter | `exact` |"
        in lines[2 + [row.name for row in TABLE].index("resumes_total")]
    )
