"""Environments of the quantizing tools, and a folder in which the page's commands find what they name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protocol.config import default_cache_dir
from tests.tools.page import Page

ROOT = Path(__file__).parents[2]

#: On two busy cores; alone on them, minutes.
INSTALL_TIMEOUT_S = 3600.0
QUANTIZE_TIMEOUT_S = 5400.0

#: One thread: several spin for minutes beside other work.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

#: The model of the page's last example.
LLAMA = "Meta-Llama-3-8B-Instruct"

_DONE = ".done"


@pytest.fixture(scope="session")
def page() -> Page:
    return Page.read()


@pytest.fixture(scope="session")
def environment(page: Page) -> Callable[[str], Path]:
    """`environment(tool)` is the tool's virtual environment, made by the page's commands and kept for the next time.

    A tool that cannot be installed here has its tests skipped.
    """

    def make(tool: str) -> Path:
        commands = "\n".join(["set -e", *page.installing(tool)])
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        digest = hashlib.sha256(f"{version}\n{commands}".encode()).hexdigest()[:12]
        folder = default_cache_dir() / "tools" / f"{tool}-{digest}"
        if not (folder / _DONE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an installation that was interrupted
            folder.mkdir(parents=True)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # whose python3 the page's is
            done = _run(commands, folder, {"PATH": path}, INSTALL_TIMEOUT_S)
            if done.returncode != 0:
                pytest.skip(f"{tool} cannot be installed: {done.stdout[-500:]}")
            (folder / _DONE).touch()
        return folder / f"venv-{tool}"

    return make


@pytest.fixture
def quantize(
    page: Page, environment: Callable[[str], Path], tmp_path: Path, demo_model: Path
) -> Callable[[str, str, int], Path]:
    """`quantize(tool, target, num_texts)` runs the page's command that writes the folder `target`: that folder."""

    def run(tool: str, target: str, num_texts: int) -> Path:
        (tmp_path / f"venv-{tool}").symlink_to(environment(tool))
        (tmp_path / demo_model.name).symlink_to(demo_model)
        write_llama(tmp_path / LLAMA, demo_model)
        name = f"quantize_{tool}.py"
        (tmp_path / name).write_text(page.scripts[name])
        (tmp_path / "calibration.txt").write_text("".join(f"{text}\n" for text in calibration_texts(num_texts)))
        done = _run(page.quantizing(tool)[target], tmp_path, ENVIRONMENT, QUANTIZE_TIMEOUT_S)
        assert done.returncode == 0, done.stdout[-4000:]
        return tmp_path / target

    return run


def write_llama(folder: Path, demo_model: Path) -> None:
    """A small random Llama in float16 with the demo model's tokenizer, in the place of one of 16 GB."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = json.loads((demo_model / "config.json").read_text()) | sizes | heads | {"torch_dtype": "float16"}
    folder.mkdir()
    for file in demo_model.glob("*token*"):
        (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    layer = {"input_layernorm": (256,), "post_attention_layernorm": (256,)}
    layer |= {f"self_attn.{name}_proj": (rows, 256) for name, rows in zip("qkvo", (256, 128, 128, 256), strict=True)}
    layer |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    shapes = {"embed_tokens": (config["vocab_size"], 256), "norm": (256,)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / 16
        for name, shape in shapes.items()
    }
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def calibration_texts(count: int) -> list[str]:
    """Sentences of this project's own pages."""
    text = " ".join((ROOT / name).read_text("utf-8") for name in ("DESIGN.md", "docs/models.md"))
    sentences = [" ".join(sentence.split()) for sentence in text.split(". ")]
    return [f"{sentence}." for sentence in sentences if 60 < len(sentence) < 600][:count]


def _run(command: str, cwd: Path, environ: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("SLUICEGATE_", "PYTHON"))}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=clean | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
