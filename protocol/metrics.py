"""Every metric there is, in one table; and the instruments a program makes of its rows.

Names are vLLM's under our prefix where vLLM has the metric, so its dashboards need one
replacement. What a client can see is measured by the gateway, what a device does by the engine,
nothing by both.

    instruments = metrics.build(Owner.GATEWAY, registry)
    first_token = instruments.histogram("time_to_first_token_seconds")
    first_token.labels(model_name="smollm2").observe(0.031)

A counter's `_total` is part of its name here, as it is in Prometheus.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from protocol.tally import TalliedHistogram

PREFIX = "sluicegate:"

#: What `exposition` writes, for the Content-Type header.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Owner(enum.StrEnum):
    """The program that observes a metric."""

    GATEWAY = "gateway"
    ENGINE = "engine"


class Type(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `buckets` are the upper bounds of a histogram, without the infinite one.

    `is_tallied`: it is observed at every token, and `Instruments.tallied`.
    """

    owner: Owner
    type: Type
    name: str
    help: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()
    is_tallied: bool = False


_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_GAP = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

_G, _E = Owner.GATEWAY, Owner.ENGINE
_COUNTER, _GAUGE, _HISTOGRAM = Type.COUNTER, Type.GAUGE, Type.HISTOGRAM

TABLE = (
    Metric(
        _G,
        _HISTOGRAM,
        "time_to_first_token_seconds",
        "From a request's arrival to its first token, streamed or not.",
        buckets=_TTFT,
    ),
    Metric(
        _G,
        _HISTOGRAM,
        "inter_token_latency_seconds",
        "Between two deliveries of one choice of a stream.",
        buckets=_TOKEN_GAP,
        is_tallied=True,
    ),
    Metric(
        _G,
        _HISTOGRAM,
        "request_time_per_output_token_seconds",
        "A choice's time after its first token, per token after it.",
        buckets=_TOKEN_GAP,
    ),
    Metric(
        _G,
        _HISTOGRAM,
        "e2e_request_latency_seconds",
        "From arrival to end of a request answered in full.",
        buckets=_LATENCY,
    ),
    Metric(_G, _HISTOGRAM, "request_prompt_tokens", "Prompt tokens of a request.", buckets=_TOKENS),
    Metric(_G, _HISTOGRAM, "request_generation_tokens", "Generated tokens of a request.", buckets=_TOKENS),
    Metric(
        _G,
        _HISTOGRAM,
        "request_max_num_generation_tokens",
        "Generated tokens of a request's longest choice.",
        buckets=_TOKENS,
    ),
    Metric(_G, _HISTOGRAM, "request_params_n", "The n that requests ask for.", buckets=_CHOICES),
    Metric(_G, _HISTOGRAM, "request_params_max_tokens", "The max_tokens of requests.", buckets=_TOKENS),
    Metric(
        _G,
        _COUNTER,
        "request_success_total",
        "Choices that ended, by finish reason; abort is a client that left, error what the gateway could not finish.",
        labels=("model_name", "finished_reason"),
    ),
    Metric(_G, _COUNTER, "request_errors_total", "Requests answered with an error.", labels=("status",)),
    Metric(
        _G, _COUNTER, "resumes_total", "Choices that went on after a lost engine, by equal bits.", labels=("exact",)
    ),
    Metric(_G, _GAUGE, "engines_serving", "Engines that this gateway can send work to.", labels=()),
    Metric(_E, _GAUGE, "num_requests_running", "Requests in a slot."),
    Metric(_E, _GAUGE, "num_requests_waiting", "Requests waiting for a slot."),
    Metric(_E, _GAUGE, "kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 is all."),
    Metric(
        _E,
        _GAUGE,
        "cache_config_info",
        "Always 1; the KV cache is described by the labels.",
        labels=("model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
    ),
    Metric(_E, _COUNTER, "prompt_tokens_total", "Prompt tokens taken in."),
    Metric(_E, _COUNTER, "generation_tokens_total", "Tokens sampled."),
    Metric(_E, _COUNTER, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    Metric(_E, _COUNTER, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    Metric(_E, _COUNTER, "num_preemptions_total", "Requests that lost their blocks to another."),
    Metric(_E, _COUNTER, "num_aborts_total", "Requests that their gateway ended."),
    Metric(
        _E, _HISTOGRAM, "request_queue_time_seconds", "From a Submit's arrival to its first step.", buckets=_LATENCY
    ),
    Metric(
        _E,
        _HISTOGRAM,
        "request_prefill_time_seconds",
        "From a request's first step to its first token.",
        buckets=_LATENCY,
    ),
    Metric(
        _E, _HISTOGRAM, "request_decode_time_seconds", "From a request's first token to its last.", buckets=_LATENCY
    ),
    Metric(
        _E,
        _HISTOGRAM,
        "request_inference_time_seconds",
        "From a request's first step to its last token.",
        buckets=_LATENCY,
    ),
    Metric(
        _E,
        _HISTOGRAM,
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that the prefix cache did not have.",
        buckets=_TOKENS,
    ),
    Metric(_E, _HISTOGRAM, "iteration_tokens_total", "Tokens computed in a step.", buckets=_BATCH),
    Metric(_E, _HISTOGRAM, "step_duration_seconds", "From the launch of a step to its commit.", buckets=_STEP),
)


class Instruments:
    """The instruments of one program, by the names of the table."""

    def __init__(self, owner: Owner, registry: CollectorRegistry) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._tallied: dict[str, TalliedHistogram] = {}
        for row in TABLE:
            if row.owner is not owner:
                continue
            name = PREFIX + row.name
            match row.type:
                case Type.COUNTER:
                    self._counters[row.name] = Counter(name, row.help, row.labels, registry=registry)
                case Type.GAUGE:
                    # Every worker of a gateway sees the same engines, so their figures are not added.
                    self._gauges[row.name] = Gauge(
                        name, row.help, row.labels, registry=registry, multiprocess_mode="livemax"
                    )
                case Type.HISTOGRAM if row.is_tallied:
                    self._tallied[row.name] = TalliedHistogram(name, row.help, row.labels, row.buckets, registry)
                case Type.HISTOGRAM:
                    self._histograms[row.name] = Histogram(
                        name, row.help, row.labels, registry=registry, buckets=row.buckets
                    )

    def counter(self, name: str) -> Counter:
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        return self._gauges[name]

    def histogram(self, name: str) -> Histogram:
        return self._histograms[name]

    def tallied(self, name: str) -> TalliedHistogram:
        return self._tallied[name]


def build(owner: Owner, registry: CollectorRegistry) -> Instruments:
    """Instruments of a program, registered in `registry` together with the process's own figures."""
    # Else every series has a second one with the time it was made.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    return Instruments(owner, registry)


def exposition(registry: CollectorRegistry, workers_dir: str | None = None) -> bytes:
    """What `/metrics` answers.

    `workers_dir` is the folder through which several workers of one gateway add up their figures
    (PROMETHEUS_MULTIPROC_DIR, which must have been set before prometheus_client was imported).
    """
    if workers_dir is None:
        return generate_latest(registry)
    together = CollectorRegistry()
    MultiProcessCollector(together, path=workers_dir)  # type: ignore[no-untyped-call]
    return generate_latest(together)


def markdown_table(rows: Iterable[Metric] = TABLE) -> str:
    """The README's table of metrics."""
    lines = ["| metric | of | type | labels | |", "|---|---|---|---|---|"]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{PREFIX}{row.name}` | {row.owner} | {row.type} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"
