"""The package itself: its list of names, and that importing it costs nothing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parents[2]


def _output(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_every_public_name_is_there() -> None:
    assert dir(kernels) == kernels.__all__ == sorted(kernels.__all__)
    has_triton = importlib.util.find_spec("triton") is not None
    for name in kernels.__all__:
        if kernels._HOMES[name].startswith("gpu.") and not has_triton:
            continue
        assert getattr(kernels, name).__doc__ or name in ("FP8", "NUMERICS"), name
    with pytest.raises(AttributeError, match="module 'kernels' has no attribute 'conv2d'"):
        kernels.conv2d  # noqa: B018


def test_importing_it_imports_no_torch() -> None:
    assert _output("import kernels, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_transformers_still_builds_models_beside_it() -> None:
    program = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1)
print(LlamaForCausalLM(config)(torch.arange(5).unsqueeze(0)).logits.shape)
"""
    assert _output(program) == "torch.Size([1, 5, 50])"
