"""An FP8 pool with the scales of a checkpoint: its values, its memory, its bits."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kernels
from engine.loading.formats import Checkpoint
from engine.loading.store import ModelError, ModelFolder
from engine.quant.kv_cache import read_kv_scales
from protocol.sampling import SamplingParams
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import EOS_ID, NUM_NEW, prompt
from tests.engine.torch_runners import Settings, driver, load

pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
PROMPTS = (1, 5, 9)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

#: As llmcompressor describes a model of which keys and values alone are quantized.
CONFIG: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "format": "dense",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}

#: Of keys and values of each of the tiny model's layers.
SCALES = ((0.02, 0.004), (0.03, 0.005), (0.01, 0.006))


def calibrated(source: Path, path: Path, scales: tuple[tuple[float, float], ...] = SCALES) -> Path:
    """A copy of a model, with a scheme and scales as llmcompressor writes them."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    added: dict[str, Tensor] = {}
    for layer, pair in enumerate(scales):
        for part, scale in zip("kv", pair, strict=True):
            added[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    save_file(load_file(path / "model.safetensors") | added, path / "model.safetensors", metadata={"format": "pt"})
    return path


def sequences() -> list[Sequence]:
    return [Sequence(prompt(number), GREEDY, ends=(EOS_ID,)) for number in PROMPTS]


def served_ids(settings: Settings) -> list[list[int]]:
    return driver(*load(settings)).run(sequences())


#: transformers with a cache that rounds what it is given, as the pool does.
_PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, DynamicCache
torch.set_num_threads(1)
scales = json.loads(sys.argv[4])

def kept(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

class Rounded(DynamicCache):
    def update(self, keys, values, layer, *args, **options):
        return super().update(kept(keys, scales[layer][0]), kept(values, scales[layer][1]), layer, *args, **options)

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
found = []
for ids in json.loads(sys.argv[2]):
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=int(sys.argv[3]),
                             min_new_tokens=int(sys.argv[3]), past_key_values=Rounded())
    found.append(out[0, len(ids):].tolist())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("scales", [SCALES, ((1.0, 1.0),) * 3], ids=["scales", "none"])
def test_equals_transformers_with_rounded_keys_and_values(
    tiny_models: Path, tmp_path: Path, kernel_cache: Path, scales: tuple[tuple[float, float], ...]
) -> None:
    source = tiny_models / "llama_untied"
    model = calibrated(source, tmp_path / "m") if scales is SCALES else source
    arguments = (str(source), json.dumps([prompt(number) for number in PROMPTS]), str(NUM_NEW), json.dumps(scales))
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *arguments]
    expected = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=tmp_path).stdout)
    assert served_ids(Settings(str(model), kv_cache_dtype="fp8", cache_dir=kernel_cache)) == expected


def test_the_checkpoint_decides_and_an_option_overrules_it(
    tiny_models: Path, tmp_path: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole_blocks = 24 * 2**20  # of every type
    plain = Settings(str(tiny_models / "llama_untied"), cache_dir=kernel_cache, kv_cache_memory_bytes=whole_blocks)
    made = replace(plain, model=str(calibrated(tiny_models / "llama_untied", tmp_path / "m")))
    choices = (plain, made, replace(made, kv_cache_dtype="bfloat16"), replace(plain, kv_cache_dtype="fp8_e4m3"))
    with caplog.at_level(logging.WARNING, "engine"):
        infos = [load(each)[1] for each in choices]
    of_float, of_fp8, of_bfloat16, unscaled = (info.num_blocks for info in infos)
    assert (of_fp8, of_bfloat16, unscaled) == (4 * of_float, 2 * of_float, 4 * of_float)
    # A request never goes on with another type of pool, whatever else is equal.
    assert infos[1].digest == infos[2].digest
    assert len({info.numerics for info in infos}) == 4
    (warning,) = caplog.messages
    assert warning.startswith("Using KV cache scales of 1.0 for FP8 in 6 of 6 places, as the model has none there")


def test_scales_are_read_and_used(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    """What is too large for FP8 is cut, which is nearly everything with a tiny scale."""
    source = tiny_models / "llama_untied"
    settings = Settings(str(source), kv_cache_dtype="fp8", cache_dir=kernel_cache)
    ids = [
        served_ids(replace(settings, model=str(calibrated(source, tmp_path / str(number), ((scale, scale),) * 3))))
        for number, scale in enumerate((2.0**-6, 2.0**-14))
    ]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_composition_of_steps_changes_a_bit(
    tiny_models: Path, tmp_path: Path, kernel_cache: Path, dtype: str
) -> None:
    model = calibrated(tiny_models / "llama_head_dim", tmp_path / "m")
    sampling = replace(GREEDY, temperature=1.0, logprobs=3)
    settings = Settings(str(model), dtype=dtype, cache_dir=kernel_cache)

    def answers(chunk: int, depth: int, threads: int) -> list[tuple[list[int], list[object]]]:
        run = driver(*load(replace(settings, threads=threads)), seed=chunk)
        mine = [Sequence(prompt(number), sampling, seed=number, preempt_after=number) for number in (3, 8, 9)]
        if chunk:
            run.run(mine, chunk=chunk, depth=depth)
        else:
            mine = [run.run_alone(replace(each, preempt_after=None)) for each in mine]
        return [(each.generated, list(each.logprobs)) for each in mine]

    alone = answers(0, 1, 1)
    assert alone == answers(7, 1, 2) == answers(10**9, 2, 1)


def test_places_of_scales(tmp_path: Path) -> None:
    """llmcompressor's, AutoFP8's, ModelOpt's, an old one for both, and none; not all with a fused projection."""
    stored = {
        "l.0.self_attn.k_scale": torch.tensor(0.5),
        "l.0.self_attn.v_scale": torch.tensor([0.25], dtype=torch.bfloat16),
        "l.1.self_attn.k_proj.output_scale": torch.tensor([0.125]),
        "l.1.self_attn.v_proj.v_scale": torch.tensor([[3.0]]),
        "l.2.self_attn.kv_scale": torch.tensor([0.75]),
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(ModelFolder(tmp_path))
    layers = [f"l.{number}." for number in range(4)]
    both = kernels.KVScales(0.75, 0.75)
    scales = (kernels.KVScales(0.5, 0.25), kernels.KVScales(0.125, 3.0), both, kernels.UNSCALED)
    assert read_kv_scales(checkpoint, layers, PROJECTIONS) == scales
    fused = (scales[0], kernels.UNSCALED, both, kernels.UNSCALED)
    assert read_kv_scales(checkpoint, layers, ("self_attn.qkv_proj",)) == fused
    assert read_kv_scales(None, layers, PROJECTIONS) == (kernels.UNSCALED,) * 4


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (torch.ones(2), r"k_scale is F32 \[2\]; a scale of the KV cache is one number of F32, BF16, F16\. Use --kv"),
        (torch.ones(1, dtype=torch.int32), r"k_scale is I32 \[1\]; a scale"),
        (torch.zeros(1), "k_scale is 0.0; it must be positive and finite"),
        (torch.tensor([torch.nan]), "k_scale is nan; it must be positive and finite"),
    ],
)
def test_scales_that_are_none(tmp_path: Path, scale: Tensor, text: str) -> None:
    save_file({"l.0.self_attn.k_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=text):
        read_kv_scales(Checkpoint(ModelFolder(tmp_path)), ["l.0."], PROJECTIONS)
