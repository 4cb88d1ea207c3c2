"""bfloat16 models: no further from the same weights in float64 than transformers is in bfloat16."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loadtest.shapes import SHAPES, Shape, write_folder, write_weights
from protocol.messages import Submit, u32
from protocol.sampling import SamplingParams
from tests.engine.core_loop import Loop

#: Prompts below a tile of keys, above a split, and of several chunks.
LENGTHS = (9, 130, 700)
_TOP = 20  # alternatives compared at each position
_BLOCKS = 200

#: Writes transformers' logprobs [positions, vocabulary]. A process of its own: it probes for a package `kernels`.
_PROGRAM = """
import json, sys
import numpy, torch
from transformers import AutoModelForCausalLM
folder, device, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
for dtype, attention in ((torch.bfloat16, "sdpa"), (torch.float64, "eager")):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).to(device).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([ids], device=device)).logits[0, :-1].double().log_softmax(-1) for ids in prompts]
    numpy.save(f"{folder}/{str(dtype).removeprefix('torch.')}.npy", torch.cat(rows).cpu().numpy())
"""


def _layers(name: str) -> Shape:
    """Layers of a shape as served, with a vocabulary whose logprobs are quickly compared."""
    return dataclasses.replace(SHAPES[name], layers=4, vocab=4096)


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        pytest.param(
            *(dataclasses.replace(SHAPES["tiny"], hidden=256, ffn=512, layers=4, head_dim=64), "cpu"),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(_layers(name), "cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(300)])
            for name in ("llama8b", "qwen06b")
        ),
    ],
    ids=["cpu", "llama8b", "qwen06b"],
)
def test_logits_are_as_near_float64_as_those_of_transformers(
    shape: Shape, device: str, tmp_path: Path, kernel_cache: Path
) -> None:
    write_folder(shape, tmp_path)
    write_weights(shape, tmp_path)
    random = np.random.default_rng(5)
    prompts = [random.integers(300, shape.vocab - 1, length).tolist() for length in LENGTHS]
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(tmp_path), device, json.dumps(prompts)]
    subprocess.run(command, check=True, cwd=tmp_path)
    exact, theirs = (np.load(tmp_path / f"{dtype}.npy") for dtype in ("float64", "bfloat16"))

    loop = Loop(
        tmp_path,
        num_blocks=_BLOCKS,
        kv_cache_memory_bytes=_BLOCKS * shape.layers * 2 * shape.kv_heads * shape.head_dim * 16 * 2,
        device=device,
        max_model_len=1024,
        max_num_batched_tokens=512,
        cache_dir=kernel_cache,
    )
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=_TOP)
    answers = loop.run(
        [
            Submit(number, f"r{number}", u32(ids), sampling, seed=0, prompt_logprobs_from=1)
            for number, ids in enumerate(prompts)
        ]
    )
    rows = [row for number in range(len(prompts)) for row in answers[number].prompt_logprobs]
    ids, ours = np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
    assert ids.shape == (len(exact), _TOP)
    exact, theirs = (np.take_along_axis(logprobs, ids, 1) for logprobs in (exact, theirs))
    our_error, their_error = (np.sqrt(np.mean((found - exact) ** 2)) for found in (ours, theirs))
    assert 0 < our_error <= their_error
