"""Results to a Markdown table and plots. Reads the JSON of `result` and nothing else."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.stats import bucket_end_s

Document = Mapping[str, Any]
Summary = Mapping[str, Any]

MS = 1e3  # seconds to milliseconds


def _quantile(field: str, name: str) -> Callable[[Summary], float | None]:
    def read(summary: Summary) -> float | None:
        return None if summary[field] is None else summary[field][name] * MS

    return read


def _rate(field: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[field]


def _goodput(summary: Summary) -> float | None:
    goodput = summary.get("goodput")  # files from before there was one have none
    return None if goodput is None else goodput["requests_per_s"]


# Heading, digits, value; a cell is the median of the repeats.
Column = tuple[str, int, Callable[[Summary], float | None]]
_COLUMNS: tuple[Column, ...] = (
    ("req/s", 2, _rate("requests_per_s")),
    ("output tok/s", 1, _rate("output_tokens_per_s")),
    *((f"TTFT {p} ms", 0, _quantile("ttft_s", p)) for p in ("p50", "p90", "p99")),
    *((f"ITL {p} ms", 1, _quantile("itl_s", p)) for p in ("p50", "p90", "p99")),
    ("TPOT p50 ms", 1, _quantile("tpot_s", "p50")),
    ("end to end p50 ms", 0, _quantile("e2e_s", "p50")),
)


def markdown(documents: Mapping[str, Document]) -> str:
    """A table with one row a document (name -> document), then where and how each was measured."""
    columns = _COLUMNS
    if any(_goodput(run["summary"]) is not None for document in documents.values() for run in document["runs"]):
        columns += (("goodput req/s", 2, _goodput),)
    headings = ["run", "workload", "load", "ok / sent", *(heading for heading, _, _ in columns)]
    lines = [_line(headings), _line(["---"] * 3 + ["---:"] * (len(headings) - 3))]
    lines += [_line(_cells(name, document, columns)) for name, document in documents.items()]
    repeated = any(len(document["runs"]) > 1 for document in documents.values())
    lines += ["", "Median of the repeats [least..most]." if repeated else "One run each, no repeats."]
    lines += [line for name, document in documents.items() for line in _notes(name, document)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(name: str, document: Document, columns: Sequence[Column]) -> list[str]:
    summaries = [run["summary"] for run in document["runs"]]
    sent = sum(summary["num_requests"] for summary in summaries)
    ok = sum(summary["num_ok"] for summary in summaries)
    cells = [name, document["config"]["workload"]["name"], _load(document["config"]), f"{ok} / {sent}"]
    return cells + [_spread([read(summary) for summary in summaries], digits) for _, digits, read in columns]


def _load(config: Mapping[str, Any]) -> str:
    load = config["load"]
    if config["loop"] == "closed":
        return f"closed, {load['concurrency']} at a time"
    burst = f" in bursts of {load['burst_size']}" if load["burst_size"] > 1 else ""
    return f"open, {load['rate']:g}/s{burst}"


def _spread(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    median = f"{statistics.median(known):.{digits}f}"
    if len(known) == 1:
        return median
    return f"{median} [{min(known):.{digits}f}..{max(known):.{digits}f}]"


def _notes(name: str, document: Document) -> list[str]:
    """What a reader has to know of one row: failures first, then the place."""
    summaries = [run["summary"] for run in document["runs"]]
    notes = []
    failures: dict[str, int] = {}
    for summary in summaries:
        for kind, count in summary["failures"].items():
            failures[kind] = failures.get(kind, 0) + count
    if failures:
        counted = ", ".join(f"{count} × {kind}" for kind, count in sorted(failures.items()))
        notes.append(f"**failed: {counted}** (times and rates are of the others)")
    if any(summary["tokens_from"].get("events") for summary in summaries):
        notes.append("tokens counted from text events, the server sends no usage")
    later = [summary["ttft_later_s"]["p50"] * MS for summary in summaries if summary["ttft_later_s"]]
    if later:
        notes.append(f"TTFT p50 with the prefix served before: {_spread(later, 0)} ms")
    notes += _goodput_note(summaries)
    notes += _server_use_note(document["runs"])
    code, hardware = document["code"], document["hardware"]
    commit = (code["commit"] or "unknown")[:12] + {True: " with changes", False: "", None: ""}[code["dirty"]]
    gpus = "".join(f", {gpu}" for gpu in hardware["gpus"])
    notes.append(f"{hardware['num_cpus']} cores of {hardware['cpu']}{gpus}")
    notes.append(f"model {document['server']['model']}, commit {commit}, seed {document['seed']}")
    return ["", f"{name}: " + "; ".join(notes) + "."]


def _goodput_note(summaries: Sequence[Summary]) -> list[str]:
    found = [goodput for summary in summaries if (goodput := summary.get("goodput"))]
    if not found:
        return []
    names = (("ttft_s", "TTFT"), ("itl_s", "p99 of its ITL"))
    slo = " and ".join(f"{name} ≤ {found[0]['slo'][key] * MS:g} ms" for key, name in names if found[0]["slo"][key])
    share = _spread([100 * goodput["share"] for goodput in found], 1)
    return [f"goodput counts the {share} % of the requests sent with {slo}"]


def _server_use_note(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    uses = [(run["server_use"], run["summary"]["output_tokens"]) for run in runs if run["server_use"]]
    if not uses:
        return []
    per_token = [use["cpu_s"] * MS / tokens for use, tokens in uses if tokens]
    others = max(use["others_share"] for use, _ in uses)
    text = f"server {_spread(per_token, 3)} ms of processor time per output token, "
    text += f"PSS {uses[-1][0]['pss_mib']:.0f} MiB, RSS {uses[-1][0]['rss_mib']:.0f} MiB, "
    return [text + f"others took up to {others:.0%} of the machine"]


def draw(documents: Mapping[str, Document], folder: Path) -> list[Path]:
    """Draws `ttft.png`, `itl.png` and `throughput.png` into `folder`. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    ttft = {name: _ttft_cdf(document["runs"]) for name, document in documents.items()}
    itl = {name: _itl_cdf(document["runs"]) for name, document in documents.items()}
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _draw_cdf(ttft, "time to first token", folder / "ttft.png"),
        _draw_cdf(itl, "gap between text events", folder / "itl.png"),
        _draw_throughput(documents, folder / "throughput.png"),
    ]


Curve = tuple[list[float], list[float]]  # milliseconds, share of the values up to there


def _ttft_cdf(runs: Iterable[Mapping[str, Any]]) -> Curve:
    rows = (row for run in runs for row in run["requests"])
    values = sorted(row["ttft_s"] * MS for row in rows if row["failure"] is None and row["ttft_s"] is not None)
    return values, [(rank + 1) / len(values) for rank in range(len(values))]


def _itl_cdf(runs: Iterable[Mapping[str, Any]]) -> Curve:
    counts: dict[float, int] = {}
    for run in runs:
        for bucket, count in run["itl_histogram"].items():
            end = bucket_end_s(bucket) * MS
            counts[end] = counts.get(end, 0) + count
    total, below = sum(counts.values()), 0
    shares = []
    for end in sorted(counts):
        below += counts[end]
        shares.append(below / total)
    return sorted(counts), shares


def _draw_cdf(curves: Mapping[str, Curve], title: str, path: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, (values, shares) in curves.items():
        axes.step(values, shares, where="post", label=name)
    for share in (0.5, 0.9, 0.99):
        axes.axhline(share, color="0.85", linewidth=0.8, zorder=0)
    if any(values for values, _ in curves.values()):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=f"{title}, ms", ylabel="share of all", ylim=(0, 1.01))
    axes.legend()
    figure.savefig(path, dpi=150)
    return path


def _draw_throughput(documents: Mapping[str, Document], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.5 * len(documents)), layout="constrained")
    axes = figure.add_subplot()
    for position, document in enumerate(documents.values()):
        rates = [run["summary"]["output_tokens_per_s"] for run in document["runs"]]
        median = statistics.median(rates)
        spread = [[median - min(rates)], [max(rates) - median]]
        bar = axes.barh(position, median, xerr=spread, capsize=3, color=f"C{position % 10}")
        axes.bar_label(bar, fmt="%.1f", padding=6)
    axes.set_yticks(range(len(documents)), list(documents))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="output tokens per second, median of the repeats with least and most")
    figure.savefig(path, dpi=150)
    return path
