"""The report as a person reads it."""

from __future__ import annotations

from engine.preflight.report import MemoryPlan, Report
from engine.preflight.table import render

PLAN = MemoryPlan(
    device="NVIDIA H200",
    num_devices=2,
    total=140 * 2**30,
    weights=66 * 2**30,
    work=2**31,
    pool=60 * 2**30,
    kv_per_token=160 * 1024,
    context_length=8192,
    max_tokens=393216,
    max_context_length=131072,
    max_sequences=48,
)


def test_all_parts() -> None:
    report = Report("acme/large", memory=PLAN)
    report.fact("architecture", "LlamaForCausalLM")
    report.warn("chat template", "There is none.")
    report.problem("files", "model-00002-of-00002.safetensors is missing.", "Fetch it.")
    report.problem("context", "--max-model-len 9 is too much.")
    assert render(report, color=False).splitlines() == [
        "acme/large",
        "",
        "  architecture  LlamaForCausalLM",
        "  device        2 × NVIDIA H200, 140.00 GiB each",
        "  weights       66.00 GiB",
        "  a step        about 2.00 GiB",
        "  KV            60.00 GiB; 160.0 KiB a token",
        "  fits          393216 tokens: 48 sequences of 8192; longest context 131072",
        "",
        "  warning, chat template",
        "    There is none.",
        "",
        "  problem 1, files",
        "    model-00002-of-00002.safetensors is missing.",
        "    → Fetch it.",
        "",
        "  problem 2, context",
        "    --max-model-len 9 is too much.",
        "",
        "It cannot be served: 2 problems.",
    ]


def test_long_texts_stay_in_their_column() -> None:
    report = Report("m")
    report.fact("architecture", "word " * 40)
    lines = render(report, color=False).splitlines()[2:-2]
    assert len(lines) == 3
    assert all(line.startswith(" " * 16) for line in lines[1:])
    assert max(map(len, lines)) <= 100


def test_colors_are_for_terminals() -> None:
    assert "\x1b[32mIt can be served.\x1b[0m" in render(Report("m"), color=True)
    assert "\x1b" not in render(Report("m"), color=False)


def test_one_problem_is_one_sentence_for_a_start() -> None:
    report = Report("acme/large")
    report.problem("files", "One is missing.", "Fetch it.")
    assert report.error_text() == "acme/large: One is missing. Fetch it."
    report.problem("context", "Too long.")
    assert report.error_text() == "acme/large has 2 problems:\n  1. One is missing. Fetch it.\n  2. Too long."
