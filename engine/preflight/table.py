"""A report as people like to read it on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from engine.preflight.memory import gib
from engine.preflight.report import MemoryPlan, Problem, Report

_WIDTH = 100

_GOOD, _BAD, _ODD, _STRONG, _END = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"


def render(report: Report, *, color: bool) -> str:
    """Facts, memory, warnings, problems, and a last line that says it all."""
    rows = [(fact.about, fact.text) for fact in report.facts]
    rows += [] if report.memory is None else list(_memory(report.memory))
    width = max((len(about) for about, _ in rows), default=0)
    lines = [_paint(report.model, _STRONG, color), ""]
    for about, text in rows:
        lines += _wrapped(f"  {about:<{width}}  ", text)
    for mark, tint, items in (("warning", _ODD, report.warnings), ("problem", _BAD, report.problems)):
        for number, item in enumerate(items, 1):
            lines += ["", *_item(f"{mark} {number}" if len(items) > 1 else mark, tint, item, color)]
    return "\n".join([*lines, "", _verdict(report, color)])


def _memory(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    each = f"{plan.num_devices} × {plan.device}" if plan.num_devices > 1 else plan.device
    yield (
        "device",
        each if plan.total is None else f"{each}, {gib(plan.total)}{' each' if plan.num_devices > 1 else ''}",
    )
    yield "weights", gib(plan.weights)
    yield "a step", f"about {gib(plan.work)}"
    pool = "the device's memory is not known; give --gpu-memory-bytes" if plan.pool is None else gib(max(0, plan.pool))
    yield "KV", f"{pool}; {plan.kv_per_token / 1024:.1f} KiB a token"
    if plan.max_tokens is not None:
        yield (
            "fits",
            f"{plan.max_tokens} tokens: {plan.max_sequences} sequences of {plan.context_length}; longest context "
            f"{plan.max_context_length}",
        )


def _item(mark: str, tint: str, item: Problem, color: bool) -> Iterator[str]:
    yield f"  {_paint(mark, tint, color)}, {item.about}"
    yield from _wrapped("    ", item.text)
    if item.remedy:
        yield from _wrapped("    → ", item.remedy)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False
    ) or [first.rstrip()]


def _verdict(report: Report, color: bool) -> str:
    if report.ok:
        return _paint("It can be served.", _GOOD, color)
    count = len(report.problems)
    return _paint(f"It cannot be served: {count} problem{'s' if count > 1 else ''}.", _BAD, color)


def _paint(text: str, tint: str, color: bool) -> str:
    return f"{tint}{text}{_END}" if color else text
