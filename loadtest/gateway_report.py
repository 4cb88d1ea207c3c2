"""What `loadtest gateway` found, as a Markdown table and a plot."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from loadtest.gateway import RAMP_S, Cost, Report, Run
from loadtest.stats import Distribution, bucket_end_s

MS = 1e3

#: Issue and design: most processor time a token, and what it may become; longest delays.
TARGET_US, GOAL_US = 30.0, 20.0
TARGET_DELAY_MS, TARGET_FIRST_MS = 10.0, 2.0


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    target: str
    digits: int
    value: Callable[[Run], float]


def _latency(quantile: str) -> Callable[[Run], float]:
    return lambda run: _ms(run.latency.send_to_client_s, quantile)


def _first_write(quantile: str) -> Callable[[Run], float]:
    return lambda run: _ms(run.first_write_s, quantile)


def _ms(distribution: Distribution | None, quantile: str) -> float:
    assert distribution is not None, "a paced run has delays"
    return float(getattr(distribution, quantile)) * MS


_LINES = (
    _Line(
        "gateway, µs of processor a token",
        f"≤ {TARGET_US:g}, goal {GOAL_US:g}",
        1,
        lambda run: run.paced.cpu_us_per_token,
    ),
    _Line("events a token", "1", 4, lambda run: run.paced.num_events / run.paced.num_tokens),
    _Line("engine to client, p50 ms", "", 2, _latency("p50")),
    _Line("engine to client, p99 ms", f"≤ {TARGET_DELAY_MS:g}", 2, _latency("p99")),
    _Line("first event of a request alone, p50 ms", f"< {TARGET_FIRST_MS:g}", 2, _first_write("p50")),
    _Line("first event of a request alone, p99 ms", "", 2, _first_write("p99")),
    _Line("tokens/s at full speed", "", 0, lambda run: run.full_speed.tokens_per_s),
    _Line("at full speed, µs of processor a token", "", 1, lambda run: run.full_speed.cpu_us_per_token),
    _Line("gateway RSS, MiB", "", 0, lambda run: run.paced.rss_mib),
)


def table(report: Report) -> str:
    """Medians of the repeats with least and most, then where and how they were measured."""
    plan, code, hardware = report.plan, report.code, report.hardware
    lines = ["| | target | median [least..most] |", "|---|---:|---:|"]
    for line in _LINES:
        values = [line.value(run) for run in report.runs]
        spread = f"{statistics.median(values):.{line.digits}f}"
        spread += f" [{min(values):.{line.digits}f}..{max(values):.{line.digits}f}]" if len(values) > 1 else ""
        lines.append(f"| {line.name} | {line.target} | {spread} |")
    commit = (code.commit or "unknown")[:12] + (" with changes" if code.dirty else "")
    busiest = max(cost.others_share for run in report.runs for cost in (run.paced, run.latency, run.full_speed))
    lines += [
        "",
        f"{len(report.runs)} repeats. Cost: {plan.streams} streams at {plan.rate:g} tokens/s, {plan.num_tokens} tokens "
        f"each, one event of 15 bytes of text a token; they begin over {RAMP_S:g} s. Delays: {plan.latency_streams} "
        f"such streams, from just before the engine encodes and sends a step to the client's read. "
        f"Full speed: {plan.full_speed_streams} streams at once. "
        f"Engine, gateway and client share {hardware.num_cpus} cores of {hardware.cpu}; other processes took up to "
        f"{busiest:.0%} of the machine. "
        f"Commit {commit}.",
    ]
    return "\n".join(lines) + "\n"


def draw(report: Report, path: Path) -> Path:
    """Processor time a token by repeat, and the delays of all repeats. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    cost, delay = figure.subplots(1, 2)
    values = [run.paced.cpu_us_per_token for run in report.runs]
    cost.bar_label(cost.bar([f"repeat {number}" for number in range(1, len(values) + 1)], values), fmt="%.1f")
    for limit, name in ((TARGET_US, "target"), (GOAL_US, "goal")):
        cost.axhline(limit, color="0.5", linewidth=0.8, linestyle="--")
        cost.annotate(name, (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    cost.set(ylabel="gateway, µs of processor a token", title=f"{report.plan.streams} streams")
    delay.step(*_shares(run.latency for run in report.runs), where="post")
    delay.axvline(TARGET_DELAY_MS, color="0.5", linewidth=0.8, linestyle="--")
    delay.axhline(0.99, color="0.85", linewidth=0.8)
    title = f"{report.plan.latency_streams} streams"
    delay.set(xscale="log", xlabel="engine to client, ms", ylabel="share of tokens", ylim=(0, 1.01), title=title)
    delay.xaxis.set_major_formatter("{x:g}")
    delay.xaxis.set_minor_formatter("{x:g}")
    figure.savefig(path, dpi=150)
    return path


def _shares(costs: Iterable[Cost]) -> tuple[list[float], list[float]]:
    """Milliseconds, and the share of all tokens that took no longer."""
    counts = Counter[float]()
    for cost in costs:
        for bucket, count in cost.send_to_client_histogram.items():
            counts[bucket_end_s(bucket) * MS] += count
    total, below, shares = counts.total(), 0, []
    for end in sorted(counts):
        below += counts[end]
        shares.append(below / total)
    return sorted(counts), shares
