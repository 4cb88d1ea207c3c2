"""Tiny random models in the layouts of the texts, made with our own packers; no transformers, so in a blink."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.preflight.folders import tensors_of
from tests.engine.quant.packers import Packed, awq, gptq
from tests.engine.tiny_models import VOCAB_SIZE, write_tokenizer

#: Sizes that groups of 128 divide, and a context as long as the texts have it.
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: As the texts have it, name of the original included.
QUANTIZE_CONFIG: dict[str, object] = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "model_name_or_path": "TheBloke/Llama-2-7B-GPTQ",
}

#: AutoAWQ's, in its older names.
QUANT_CONFIG: dict[str, object] = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}

Pack = Callable[[int, int, int], Packed]


def pack_gptq(bits: int = 4, group_size: int = 128) -> Pack:
    return lambda rows, columns, seed: gptq(rows, columns, bits=bits, group_size=group_size, symmetric=True, seed=seed)


def pack_awq(rows: int, columns: int, seed: int) -> Packed:
    return awq(rows, columns, group_size=128, seed=seed)


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint, and those that they stand for."""

    stored: dict[str, Tensor]
    plain: dict[str, Tensor]


def random_weights(config: Mapping[str, object] = CONFIG, pack: Pack | None = None) -> Weights:
    """Large enough that the likeliest token stands well apart. `pack` quantizes linear layers."""
    generator = torch.Generator().manual_seed(7)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for seed, (name, (_, shape)) in enumerate(tensors_of(dict(config)).items()):
        if pack is not None and name.endswith("_proj.weight"):
            packed = pack(*shape, seed)
            plain[name] = packed.weight
            stored |= {name.removesuffix("weight") + ending: part for ending, part in packed.tensors.items()}
            continue
        mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
        stored[name] = plain[name] = torch.empty(shape).normal_(mean, deviation, generator=generator).half()
    return Weights(stored, plain)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] = CONFIG) -> Path:
    """config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    write_tokenizer(folder)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def split(folder: Path, count: int) -> None:
    """The weights of a folder in `count` files and an index, as the hub has large models."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    weight_map = {}
    for number in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[number::count]}
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
