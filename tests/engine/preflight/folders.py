"""Model folders for a look at them: real headers and sizes, and no weights behind them (sparse files)."""

from __future__ import annotations

import json
import math
from pathlib import Path

from engine.models import family_of
from engine.models.config import ConfigFields
from engine.models.layout import layout_of

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1}

#: Llama 3.1 8B with fewer layers.
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tensors_of(config: dict[str, object], dtype: str = "BF16") -> Tensors:
    """What a plain checkpoint of this config holds."""
    family = family_of(config["architectures"])
    layout = layout_of(family.spec(ConfigFields(config)), family.names)
    plain: Tensors = {name: (dtype, shape) for name, shape in layout.plain.items()}
    for matrix in layout.matrices:
        plain[f"{matrix.name}.weight"] = (dtype, (matrix.rows, matrix.columns))
        if matrix.bias:
            plain[f"{matrix.name}.bias"] = (dtype, (matrix.rows,))
    return plain


def write_safetensors(file: Path, tensors: Tensors) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def write_model(
    folder: Path, config: dict[str, object] = CONFIG, tensors: Tensors | None = None, shards: int = 1
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    tensors = tensors_of(config) if tensors is None else tensors
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map, names = {}, list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_tokenizer(folder: Path) -> None:
    vocab = {"<unk>": 0, "a": 1, "</s>": 2}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
