"""Every problem that a look at a model finds, alone and together, in its words."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine import host_memory
from engine.preflight import check
from engine.preflight.devices import Device
from tests.engine.preflight.folders import CONFIG, TEMPLATE, Tensors, tensors_of, write_model
from tests.engine.preflight.looks import GPU, WANTED, facts, problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m")


def test_a_good_model(folder: Path) -> None:
    report = check(folder, WANTED)
    assert report.ok
    assert report.warnings == []
    assert facts(report) == {
        "architecture": "LlamaForCausalLM: 4 layers, hidden size 4096, 32 heads of 128, 8 for keys and values, "
        "context 131072",
        "files": "1 of safetensors, 3.85 GB",
        "quantization": "none",
        "tensors": "39, each in the shape that config.json calls for",
        "dtype": "bfloat16",
        "tokenizer": "3 tokens",
        "chat template": "default",
    }


def test_memory_of_a_good_model(folder: Path) -> None:
    plan = check(folder, WANTED).memory
    assert plan is not None
    # 2 * 128256 * 4096 for the tables, 4 layers of 218103808 and two norms, one norm.
    assert plan.weights == 2 * (2 * 128256 * 4096 + 4 * (218103808 + 2 * 4096) + 4096)
    assert plan.kv_per_token == 4 * 2 * 8 * 128 * 2
    assert plan.pool == int(80 * 2**30 * 0.92) - plan.weights - plan.work
    assert plan.max_tokens == plan.pool // (16 * plan.kv_per_token) * 16
    assert plan.max_context_length == 131072
    assert plan.max_sequences == plan.max_tokens // 131072
    on_two = check(folder, replace(WANTED, tensor_parallel_size=2)).memory
    assert on_two is not None
    assert on_two.weights == pytest.approx(plan.weights / 2, rel=1e-4)
    assert on_two.kv_per_token == plan.kv_per_token // 2
    on_sixteen = check(folder, replace(WANTED, tensor_parallel_size=16)).memory
    assert on_sixteen is not None
    assert on_sixteen.kv_per_token == plan.kv_per_token // 8  # a head is not divided


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B with six layers, one of them with a plain MLP."""
    config = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144}
    config |= {"head_dim": 128, "num_hidden_layers": 6, "vocab_size": 1024, "mlp_only_layers": [0]}
    config |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    folder = write_model(tmp_path / "m", config)
    report = check(folder, WANTED)
    assert report.ok
    assert "128 experts of 768, 8 a token, context" in facts(report)["architecture"]
    assert facts(report)["tensors"].startswith("1979, each in the shape")
    attention, norms = 2048 * 128 * (2 * 32 + 2 * 8), 2 * 2048 + 2 * 128
    experts = 128 * 3 * 768 * 2048 + 128 * 2048
    assert report.memory is not None
    layers = 6 * (attention + norms) + 3 * 6144 * 2048 + 5 * experts
    assert report.memory.weights == 2 * (2 * 1024 * 2048 + layers + 2048)
    (remedy,) = problems(folder, tensor_parallel_size=512)[1:2]
    assert "columns of the MLP (768) must be divisible by tensor parallel size (512)" in remedy
    left = tensors_of(config)
    del left["model.layers.3.mlp.experts.77.up_proj.weight"]
    (problem,) = problems(write_model(tmp_path / "cut", config, left))
    assert "holds model.layers.3.mlp.experts.77.up_proj.weight [768, 2048]" in problem


def test_a_cpu_gets_what_the_engine_would_give_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 64 * 2**30)
    plan = check(folder, replace(WANTED, device=Device("cpu", "CPU"), dtype="float16")).memory
    assert plan is not None
    assert plan.pool == 2 * 2**30
    assert plan.kv_per_token == 4 * 2 * 8 * 128 * 4  # float16 is computed in float32 there


def test_parallel_as_vllm_says_it(folder: Path) -> None:
    assert problems(folder, tensor_parallel_size=3)[0] == (
        "Total number of attention heads (32) must be divisible by tensor parallel size (3). Choose 1, 2, 4, 8 or 16."
    )
    assert problems(folder, tensor_parallel_size=8) == []
    (warning,) = check(folder, replace(WANTED, tensor_parallel_size=8)).warnings
    assert warning.text.startswith("--tensor-parallel-size 8: an engine runs a model on one device so far. What fits")
    machine = replace(GPU, count=2, capability=(9, 0))
    assert problems(folder, tensor_parallel_size=4, device=machine) == [
        "--tensor-parallel-size 4 needs as many GPUs; this machine has 2. Choose at most 2."
    ]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"block_size": 8}, "--block-size 8 is not a multiple of 16 from 16 to 256. Leave it out (16)"),
        ({"block_size": 512}, "--block-size 512 is not a multiple of 16"),
        ({"max_model_len": 200_000}, "--max-model-len 200000 is more than the model's context, 131072. Set it to at"),
        (
            {"device": replace(GPU, memory=2 * 2**30)},
            "GiB of each GPU's 2.00 GiB, of which --gpu-memory-utilization 0.92 may be used: nothing is left for KV. "
            "Take more GPUs",
        ),
        (
            {"device": replace(GPU, memory=7 * 2**30)},
            "One sequence of 131072 tokens does not fit: there is memory for the KV of ",
        ),
        ({"kv_cache_memory_bytes": 2**20}, "does not fit: there is memory for the KV of 64. Raise"),
        (
            {"device": replace(GPU, name="Tesla T4", capability=(7, 5))},
            "bfloat16 needs a GPU of compute capability 8.0 or more; Tesla T4 has 7.5. Use --dtype float16.",
        ),
        ({"quantization": "awq"}, "--quantization awq: nothing in"),
    ],
)
def test_settings(folder: Path, wanted: dict[str, object], text: str) -> None:
    (found,) = problems(folder, **wanted)
    assert text in found


def test_dtype_of_an_old_gpu(folder: Path) -> None:
    assert problems(folder, device=replace(GPU, capability=(7, 5)), dtype="float16") == []


def test_a_missing_and_a_cut_shard(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    cut = folder / "model-00003-of-00003.safetensors"
    size = cut.stat().st_size
    with cut.open("r+b") as stream:
        stream.truncate(size - 1000)
    found = problems(folder)
    assert found[0].startswith(
        "model-00002-of-00003.safetensors is missing; model.safetensors.index.json lists it. Fetch"
    )
    assert f"{cut} has {size - 1000} bytes, its header describes {size}" in found[1]
    assert found[2].startswith("No file holds ")


def rename(tensors: Tensors) -> Tensors:
    return {name.replace("layers.3.mlp.down", "layers.3.mlp.other"): value for name, value in tensors.items()}


def narrow(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.k_proj.weight": ("BF16", (512, 4096))}


def whole_numbers(tensors: Tensors) -> Tensors:
    return tensors | {"model.norm.weight": ("I32", (4096,))}


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (
            rename,
            ["No file holds model.layers.3.mlp.down_proj.weight [4096, 14336]", "holds model.layers.3.mlp.other_proj"],
        ),
        (
            narrow,
            ["k_proj.weight has the shape [512, 4096]; config.json calls for [1024, 4096]. config.json and weights"],
        ),
        (whole_numbers, ["model.norm.weight is I32; supported are F32, BF16, F16"]),
    ],
)
def test_tensors_that_do_not_agree(tmp_path: Path, change: object, texts: list[str]) -> None:
    folder = write_model(tmp_path / "m", tensors=change(tensors_of(CONFIG)))  # type: ignore[operator]
    found = problems(folder)
    assert len(found) == len(texts)
    assert all(text in problem for text, problem in zip(texts, found, strict=True))


def test_many_alike_are_counted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", tensors=tensors_of(CONFIG | {"hidden_size": 2048, "head_dim": 128}))
    found = problems(folder)
    assert len(found) == 6
    assert found[-1] == "34 more problems like the last."


def test_an_archive_that_is_cut(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data", bytes(10_000))
    assert problems(folder) == []
    file.write_bytes(file.read_bytes()[:5000])
    assert problems(folder)[0].startswith("pytorch_model.bin (5000 bytes) is cut. Fetch the files again")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (found,) = problems(folder)
    assert "has no weights: neither model.safetensors nor" in found
    assert problems(folder, load_format="dummy") == []


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", "{", "config.json is not JSON"),
        (
            "config.json",
            json.dumps(CONFIG | {"num_attention_heads": 31}),
            "num_attention_heads (31) must be a multiple",
        ),
        ("config.json", json.dumps(CONFIG | {"hidden_size": "wide"}), "hidden_size must be a positive integer"),
        ("generation_config.json", '{"eos_token_id": 999999}', "eos_token_id 999999 is not a token id below 128256"),
        ("generation_config.json", '{"temperature": -1}', "generation_config.json: temperature"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json cannot be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("chat_template.jinja", "one\n{% for %}", "The chat template is no Jinja: line 2"),
    ],
)
def test_files_that_cannot_be_read(folder: Path, name: str, content: str, text: str) -> None:
    (folder / name).write_text(content)
    (found,) = problems(folder)
    assert text in found


def test_no_tokenizer_and_no_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (found,) = problems(folder)
    assert "tokenizer" in found
    assert "is not a directory" in problems(tmp_path / "none")[0]


def test_warnings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "eos_token_id"}))
    report = check(folder, WANTED)
    assert report.ok
    assert [warning.about for warning in report.warnings] == ["chat template", "generation config"]


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{% for m in x %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"],
)
def test_templates_as_transformers_has_them(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert problems(folder) == []


def test_architectures_that_are_not_ours(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["OPTForCausalLM"]}))
    report = check(folder, WANTED)
    assert report.ok
    assert "runs in the transformers backend, slow and right" in report.warnings[0].text
    (found,) = problems(folder, backend="torch_runner")
    assert "architectures is ['OPTForCausalLM']; supported here: " in found


def test_all_at_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")
    report = check(folder, replace(WANTED, tensor_parallel_size=5, block_size=20, max_model_len=10**6))
    about = {problem.about for problem in report.problems}
    assert about == {"files", "tensors", "tensor parallel", "context", "block size", "tokenizer"}
    text = report.error_text()
    assert text.startswith(f"{folder} has {len(report.problems)} problems:\n  1. ")
    assert "Total number of attention heads (32) must be divisible by tensor parallel size (5)." in text


def test_it_takes_no_torch_and_little_time(folder: Path) -> None:
    program = (
        "import sys, time; from engine.preflight.command import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'triton', 'transformers'} & sys.modules.keys(); print(time.process_time());"
        "sys.exit(status)"
    )
    words = [sys.executable, "-c", program, str(folder), "--gpu-memory-bytes=80GiB", "--json"]
    root = Path(__file__).parents[3]
    started = time.monotonic()
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    elapsed = time.monotonic() - started
    report, _, seconds = done.stdout.rpartition("}\n")
    assert json.loads(report + "}")["ok"] is True
    assert float(seconds) < 2, f"{elapsed:.1f} s on the clock"
