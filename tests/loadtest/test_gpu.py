"""The GPU measurement: its folders, its arithmetic, and one small run on a CPU from end to end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from loadtest import gpu, gpu_report
from loadtest.gpu import HttpLevel, Plan, Recording, Report, measure
from loadtest.gpu_steps import Gap, Kernel, Steps
from loadtest.machine import read_hardware
from loadtest.servers import TrialError
from loadtest.shapes import SHAPES, write_folder, write_weights

MEASURES = ("decode:2", "prefill:2x64", "ttft:64", "hit:64")


@pytest.fixture
def report() -> Report:
    return Report(["python"], "now", "c" * 40, False, read_hardware(), {"torch": "2"})


@pytest.mark.parametrize("name", ["tiny", "qwen06b", pytest.param("llama8b", marks=pytest.mark.slow)])
def test_sizes_are_the_models_own(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    write_folder(shape, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if shape.tied:
        del weights["lm_head.weight"]
    assert dict(shape.tensors()) == weights
    head = shape.vocab * shape.hidden
    matrices = sum(value.numel() for key, value in model.named_parameters() if value.dim() == 2)
    assert shape.step_weight_bytes == 2 * (matrices - (0 if shape.tied else head))


def test_weights_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.shapes.BYTES_A_SHARD", 100_000)
    shape = SHAPES["tiny"]
    write_folder(shape, tmp_path)
    total = write_weights(shape, tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert total == sum(2 * value.numel() for value in model.state_dict().values())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    with safe_open(shards[0], "pt") as shard:
        values = shard.get_tensor("model.embed_tokens.weight").float()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_every_id_is_text(tmp_path: Path) -> None:
    write_folder(SHAPES["llama8b"], tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 128256
    for token in (1000, 4351, 4352, 70_000, 128_254):
        assert len(tokenizer.decode([token])) in (2, 3)
    assert tokenizer.decode([128_255]) == ""


def test_floors() -> None:
    """Those that the figures of vLLM were published with."""
    for batch, ms in {1: 3.57, 16: 4.05, 64: 5.57, 256: 11.64}.items():
        assert gpu_report.floor(f"llama8b.decode_ms.{batch}") == pytest.approx(ms, abs=0.01)
    assert gpu_report.floor("qwen06b.decode_ms.64") == pytest.approx(2.05, abs=0.01)
    assert 8192 / gpu_report.floor("llama8b.prefill_tok_s.1x8192") == pytest.approx(0.1689, abs=0.001)
    assert gpu_report.floor("llama8b.ttft_ms.128") == pytest.approx(3.5, abs=0.1)
    assert gpu_report.floor("startup_s.warm") is None


def test_a_table_says_what_is_missed(report: Report, tmp_path: Path) -> None:
    report.add(("llama8b", "decode_ms", "1"), [4.3, 4.9, 4.39])
    report.add(("llama8b", "prefill_tok_s", "1x8192"), [35_000.0])
    report.add(("http", "tok_s", "256"), [14_000.0])
    rows = gpu_report.table(report).splitlines()
    assert rows[2] == "| llama8b.decode_ms.1 | 4.81 | 4.4 | 4 | 3.57 | 4.39 | 0.91 | 1.23 |"
    assert "| 35,000, missed | 0.91 |" in rows[3]
    assert rows[4] == "| http.tok_s.256 | 9,108 | 13,500 | 16,000 | – | 14,000 | 1.54 | – |"
    assert gpu_report.draw(report, tmp_path / "roofline.png").stat().st_size > 10_000
    report.failures["http"] = "the engine did not start\n"
    assert "\nFAILED http: the engine did not start\n" in gpu_report.table(report)
    assert report.results["llama8b"] == {"decode_ms": {"1": 4.39}, "prefill_tok_s": {"1x8192": 35_000.0}}


def test_profiles_have_the_longest_kernels_and_gaps(report: Report) -> None:
    kernels = [Kernel("_products" * 20, 4.0, 250.25), *(Kernel(f"k{number}", 0.5, 1.0) for number in range(30))]
    report.steps["llama8b.64"] = Steps(64, 6401.5, 0.3125, kernels, [Gap("a|b", "c", 1.0, 20.04)])
    lines = gpu_report.profiles(report).splitlines()
    assert lines[1] == "## llama8b, 64 streams"
    assert lines[3].startswith("64 steps in a row, 6,402 µs each as profiled, 0.312 % of it without a kernel.")
    assert lines[7] == f"| `{('_products' * 20)[:80]}` | 4 | 250.2 |"
    assert [line for line in lines if line.startswith("| `k")] == [
        f"| `k{number}` | 0.5 | 1.0 |" for number in range(19)
    ]
    assert lines[-1] == "| `a/b` | `c` | 1 | 20.0 |"
    report.add(("llama8b", "idle_percent", "64"), [0.3125])
    assert "| llama8b.idle_percent.64 | – | 3 | 3 | – | 0.312 | – | – |" in gpu_report.table(report)


def test_a_part_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what it measured before."""

    def lines(module: str, folder: str, *_: str) -> Iterator[bytes]:
        yield b'{"name": "decode:2", "values": [1.5, 1.25, 9.0]}'
        if folder.endswith("tiny"):
            raise TrialError(f"{module}: the device is gone")

    monkeypatch.setattr("loadtest.gpu._lines_of_child", lines)
    told: list[str] = []
    kept: list[set[str]] = []
    offline = {"tiny": ("decode:2",), "qwen06b": ("decode:2",)}
    plan = Plan(offline=offline, fastest={}, http=(), repeats=3, device="cpu")
    report = measure(plan, ["python"], told.append, lambda report: kept.append({*report.values}))
    assert report.failures == {"tiny": "gpu_offline: the device is gone"}
    assert report.results == {"tiny": {"decode_ms": {"2": 1.5}}, "qwen06b": {"decode_ms": {"2": 1.5}}}
    assert kept[:2] == [{"tiny.decode_ms.2"}, {"tiny.decode_ms.2", "qwen06b.decode_ms.2"}]
    assert told[1:3] == ["  decode:2: 1.5, 1.25, 9", "tiny failed: gpu_offline: the device is gone"]


def test_the_cost_of_reproducibility(report: Report) -> None:
    report.add(("llama8b", "decode_ms", "1"), [4.2, 4.4, 4.3])
    report.add(("llama8b", "prefill_tok_s", "16x2048"), [40_000.0])
    report.add(("fastest", "llama8b", "decode_ms", "1"), [4.0])
    report.add(("fastest", "llama8b", "decode_ms", "16"), [4.5])
    report.add(("fastest", "llama8b", "prefill_tok_s", "16x2048"), [41_000.0])
    gpu._add_costs("llama8b", gpu.FASTEST, report)
    costs = report.results["reproducible_cost"]
    assert costs == {"1": pytest.approx(7.5), "prefill": pytest.approx(2.5)}
    rows = [row for row in gpu_report.table(report).splitlines() if "cost" in row]
    assert rows == [
        "| reproducible_cost.1 | – | 3 | 1 | – | 7.5, missed | – | – |",
        "| reproducible_cost.prefill | – | 8 | 3 | – | 2.5 | – | – |",
    ]


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(TrialError, match="invalid choice: 'huge'"):
        gpu._child("shapes", "huge", "/nowhere")


@pytest.mark.slow
@pytest.mark.timeout(300)  # three starts, one of which compiles
def test_a_small_run(tmp_path: Path) -> None:
    http = (HttpLevel(2, 1, 4),)
    recording = Recording("tiny", 2, 32)
    plan = Plan(
        *({"tiny": MEASURES}, {"tiny": MEASURES[:2]}, http),
        repeats=2,
        device="cpu",
        recording=recording,
    )
    told: list[str] = []
    report = measure(plan, ["python"], told.append)
    names = {"tiny.load_s", "tiny.decode_ms.2", "tiny.prefill_tok_s.2x64", "tiny.ttft_ms.64", "tiny.ttft_ms.64_hit"}
    names |= {"http.tok_s.2", "http.itl_p99_ms.2", "http.ttft_p50_ms.2", "startup_s.cold", "startup_s.warm"}
    names |= {
        "tiny.idle_percent.2",
        "fastest.tiny.load_s",
        "fastest.tiny.decode_ms.2",
        "fastest.tiny.prefill_tok_s.2x64",
    }
    costs = {"reproducible_cost.2", "reproducible_cost.prefill"}
    assert set(report.values) == names | costs
    times = [name for name in names if "decode_ms" not in name]  # a difference, on a busy machine even below 0
    assert all(value > 0 for name in times for value in report.values[name])
    assert len(report.values["tiny.decode_ms.2"]) == len(report.values["http.tok_s.2"]) == 2
    # Each measure, load_s, and the level's rate; the profile; measures made again.
    assert len(told) == 4 + len(MEASURES) + 2 + 2 + 4
    steps = report.steps["tiny.2"]
    assert steps.num_steps == 64
    assert [(kernel.name, kernel.count) for kernel in steps.kernels] == [("step", 1.0)]
    assert steps.kernels[0].us < steps.step_us < 1e6
    assert steps.idle_percent < 100
    assert report.failures == {}
    assert gpu_report.draw(report, tmp_path / "roofline.png").stat().st_size > 10_000
