"""Model folders without weights, of the shapes that benchmarks use: for `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path

_LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16", "rms_norm_eps": 1e-5}

#: config.json by name. "qwen06b" has the sizes of Qwen3-0.6B, without its norms of queries and keys.
SHAPES: dict[str, dict[str, object]] = {
    "llama8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen06b": _LLAMA
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}

_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


def write_shape(name: str, folder: Path) -> Path:
    """A folder for the shape `name` under `folder`, with a tokenizer of one word."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    (path / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (path / "tokenizer_config.json").write_text("{}")
    return path
