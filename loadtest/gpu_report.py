"""What `loadtest gpu` found, beside vLLM's figures, floors and targets; and a roofline plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.gpu import Report
from loadtest.shapes import SHAPES, Shape

#: One H200, measured: 4.3 GB copied, read and write counted, and 8192³ in bfloat16.
BANDWIDTH, FLOPS = 4.24e12, 781e12

#: Of a profile: kernels and gaps, and characters of a kernel's name.
_MOST_ROWS, _NAME_LENGTH = 20, 80

CONTEXT = 1024  # tokens of a sequence whose decode step is measured, on average


@dataclass(frozen=True, slots=True)
class Target:
    """vLLM 0.26 on the same GPU, None where it was not measured; and what is aimed at. Lower is better for times."""

    name: str
    vllm: float | None
    must: float
    goal: float
    is_time: bool = True


TARGETS = (
    Target("llama8b.decode_ms.1", 4.81, 4.4, 4.0),
    Target("llama8b.decode_ms.16", 5.49, 4.9, 4.5),
    Target("llama8b.decode_ms.64", 7.26, 6.75, 6.2),
    Target("llama8b.decode_ms.256", 16.9, 15.8, 14.6),
    Target("llama8b.prefill_tok_s.1x8192", 38_562, 36_000, 41_000, is_time=False),
    Target("llama8b.prefill_tok_s.16x2048", 42_722, 41_500, 45_000, is_time=False),
    Target("llama8b.ttft_ms.128", 9.9, 7.0, 6.0),
    Target("llama8b.ttft_ms.1024", 28.8, 27.0, 25.0),
    Target("llama8b.ttft_ms.8192_hit", 13.3, 7.0, 5.0),
    Target("llama8b.ttft_ms.32768", None, 1200.0, 1000.0),
    Target("llama8b.offline_tok_s", 10_079, 11_000, 12_000, is_time=False),
    Target("qwen06b.offline_tok_s", 21_691, 26_000, 30_000, is_time=False),
    Target("llama8b.idle_percent.64", None, 3.0, 3.0),
    Target("qwen06b.decode_ms.1", 2.27, 0.9, 0.7),
    Target("qwen06b.decode_ms.64", 3.77, 2.9, 2.6),
    Target("http.tok_s.64", 8_134, 9_000, 9_500, is_time=False),
    Target("http.tok_s.256", 9_108, 13_500, 16_000, is_time=False),
    Target("http.itl_p99_ms.256", 67.7, 50.0, 30.0),
    Target("reproducible_cost.1", None, 3.0, 1.0),
    Target("reproducible_cost.16", None, 2.0, 0.0),
    Target("reproducible_cost.64", None, 2.0, 0.0),
    Target("reproducible_cost.256", None, 2.0, 0.0),
    Target("reproducible_cost.prefill", None, 8.0, 3.0),
    Target("startup_s.warm", 76.0, 25.0, 15.0),
    Target("startup_s.cold", 100.0, 60.0, 30.0),
)


def floor(name: str) -> float | None:
    """The least that bandwidth and arithmetic allow, in the measure's unit; None where it has no such floor."""
    shape_name, _, measure = name.partition(".")
    kind, _, of = measure.partition(".")
    shape = SHAPES.get(shape_name)
    if shape is None:
        return None
    if kind == "decode_ms":
        return decode_floor_s(shape, int(of)) * 1e3
    if kind == "prefill_tok_s":
        prompts, length = map(int, of.split("x"))
        return prompts * length / _prefill_floor_s(shape, prompts, length)
    if kind == "ttft_ms" and of.isdecimal():
        return _prefill_floor_s(shape, 1, int(of)) * 1e3
    return None


def decode_floor_s(shape: Shape, batch: int) -> float:
    """Weights and KV read once."""
    return (shape.step_weight_bytes + batch * CONTEXT * shape.kv_bytes) / BANDWIDTH


def _prefill_floor_s(shape: Shape, prompts: int, length: int) -> float:
    """Arithmetic, or the weights of a short prompt."""
    return max(prompts * shape.prefill_flops(length) / FLOPS, shape.step_weight_bytes / BANDWIDTH)


def table(report: Report) -> str:
    """A row for each target that was measured, what failed, and where."""
    lines = [
        "| | vLLM 0.26 | must | goal | floor | measured | of vLLM | of floor |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += _rows(report)
    lines += [f"\nFAILED {part}: {error.strip()}" for part, error in report.failures.items()]
    commit = (report.commit or "unknown")[:12] + (" with changes" if report.dirty else "")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    gpus = ", ".join(report.hardware.gpus) or "no GPU"
    lines += ["", f"{gpus}; {versions}. {report.wall_s:g} s in all. Commit {commit}."]
    return "\n".join(lines) + "\n"


def profiles(report: Report) -> str:
    """For each recording of steps its kernels and the gaps between them, the longest; empty without any."""
    lines: list[str] = []
    for name, steps in report.steps.items():
        shape, _, streams = name.partition(".")
        lines += [
            f"\n## {shape}, {streams} streams\n",
            f"{steps.num_steps} steps in a row, {steps.step_us:,.0f} µs each as profiled, {steps.idle_percent:.3g} % "
            "of it without a kernel. Kernels may overlap.\n",
            "| kernel or copy | in a step | µs a step |",
            "|---|---:|---:|",
        ]
        lines += [f"| {_code(each.name)} | {each.count:g} | {each.us:.1f} |" for each in steps.kernels[:_MOST_ROWS]]
        lines += ["\n| no kernel after | before | in a step | µs a step |", "|---|---|---:|---:|"]
        lines += [
            f"| {_code(each.after)} | {_code(each.before)} | {each.count:g} | {each.us:.1f} |"
            for each in steps.gaps[:_MOST_ROWS]
        ]
    return "".join(f"{line}\n" for line in lines)


def _code(name: str) -> str:
    """A kernel's name, as long as a table bears."""
    return "`" + name[:_NAME_LENGTH].replace("|", "/") + "`"


def _rows(report: Report) -> Iterator[str]:
    for target in TARGETS:
        value = result(report, target.name)
        if value is None:
            continue
        met = value <= target.must if target.is_time else value >= target.must
        least = floor(target.name)
        cells = [
            target.name,
            "–" if target.vllm is None else _number(target.vllm),
            _number(target.must),
            _number(target.goal),
            "–" if least is None else _number(least),
            _number(value) + ("" if met else ", missed"),
            "–" if target.vllm is None else f"{value / target.vllm:.2f}",
            "–" if least is None else f"{value / least:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def result(report: Report, name: str) -> float | None:
    """A median by its dotted name."""
    place: object = report.results
    for part in name.split("."):
        if not isinstance(place, dict) or part not in place:
            return None
        place = place[part]
    assert isinstance(place, float)
    return place


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def draw(report: Report, path: Path) -> Path:
    """Arithmetic rate over arithmetic intensity, under the GPU's two roofs. Needs matplotlib (extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    intensities = [10 ** (exponent / 20) for exponent in range(-10, 85)]
    axes.plot(intensities, [min(FLOPS, BANDWIDTH * each) / 1e12 for each in intensities], color="0.4")
    for shape_name in ("llama8b", "qwen06b"):
        points = list(_points(report, shape_name))
        if points:
            axes.scatter([x for _, x, _ in points], [y for _, _, y in points], label=shape_name, s=18)
            for number, (name, *place) in enumerate(points):  # to the left of a point, neighbours on two lines
                offset = (-4, 4 if number % 2 else -9)
                axes.annotate(name, place, textcoords="offset points", xytext=offset, ha="right", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte of weights and KV", ylabel="TFLOP/s")
    if axes.collections:
        axes.legend()
    figure.savefig(path, dpi=120)
    return path


def _points(report: Report, shape_name: str) -> Iterator[tuple[str, float, float]]:
    """Name, operations a byte, and TFLOP/s of each decode and prefill measure."""
    shape = SHAPES[shape_name]
    for target in TARGETS:
        name, _, measure = target.name.partition(".")
        kind, _, of = measure.partition(".")
        value = result(report, target.name)
        if name != shape_name or value is None:
            continue
        if kind == "decode_ms":
            batch = int(of)
            flops = batch * (shape.step_weight_bytes + 4.0 * shape.layers * shape.heads * shape.head_dim * CONTEXT)
            moved = shape.step_weight_bytes + batch * CONTEXT * shape.kv_bytes
            yield f"decode {of}", flops / moved, flops / (value * 1e-3) / 1e12
        elif kind == "prefill_tok_s":
            prompts, length = map(int, of.split("x"))
            flops = prompts * shape.prefill_flops(length)
            moved = shape.step_weight_bytes + prompts * length * shape.kv_bytes
            yield f"prefill {of}", flops / moved, flops * value / (prompts * length) / 1e12
