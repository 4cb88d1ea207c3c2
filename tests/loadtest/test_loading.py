"""Loading beside the disk: a small model for real, and the table of a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loadtest import loading
from loadtest.loading import Repeat, Report
from loadtest.machine import Code, read_hardware
from loadtest.process import Memory, ProcessUse, ServerUse
from loadtest.servers import ServerFailed, TrialError
from tests.engine.preflight.folders import tensors_of
from tests.engine.tiny_models import VOCAB_SIZE, write_tokenizer

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
NUM_FILES = 8


def write_large(folder: Path) -> Path:
    """270 MB in eight files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    layers = [[name for name in tensors_of(CONFIG) if f".{number}." in name] for number in range(NUM_FILES)]
    layers[0] += [name for name in tensors_of(CONFIG) if "layers" not in name]
    weight_map = {}
    for number, names in enumerate(layers, 1):
        file = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
        tensors = {name: torch.zeros(tensors_of(CONFIG)[name][1], dtype=torch.bfloat16) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_load_takes_no_more_than_a_file_above_the_weights(tmp_path: Path, kernel_cache: Path) -> None:
    told: list[str] = []
    flags = ["--device=cpu", "--kv-cache-memory-bytes=32MiB", f"--cache-dir={kernel_cache}"]
    report = loading.measure(write_large(tmp_path / "m"), flags, 1, ["test"], told.append)
    assert report.weight_bytes > NUM_FILES * 33_000_000
    (repeat,) = report.repeats
    (process,) = repeat.use.processes
    assert (process.memory_mib.peak_rss - process.memory_mib.rss) * 2**20 < report.largest_file_bytes
    assert 0 < repeat.load_s < repeat.start_s
    assert told == ["repeat 1 of 1"]


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(TrialError, match=r"has no \*\.safetensors"):
        loading.measure(tmp_path, [], 1, [], lambda _: None)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ServerFailed, match=r"it ended with status 2"):
        loading.measure(tmp_path, ["--device=cpu"], 1, [], lambda _: None)


def test_the_table() -> None:
    def repeat(dd_s: float, load_s: float) -> Repeat:
        memory = Memory(rss=1000.0, pss=900.0, peak_rss=1021.5)
        return Repeat(dd_s, load_s, 6.0, ServerUse(6.0, 4.5, 1000.0, 900.0, [ProcessUse(1, "p", 4.5, memory)], 0.25))

    repeats = [repeat(1.0, 2.0), repeat(1.0, 1.25), repeat(1.0, 1.0)]
    report = Report(["load"], Code(None, None), read_hardware(), {}, 970_000_000, 200 * 2**20, repeats)
    assert report.share == 0.8
    lines = loading.table(report).splitlines()
    assert lines[2] == "| 970 MB/s | 485 MB/s | 0.50 | 6.0 s | 4.5 s | 0.25 | 22 MiB |"
    assert lines[-1] == "Median share of the disk's rate: 0.80 (target 0.8); the largest file has 200 MiB."
