"""Tiny random models of architectures that only transformers has, as folders with the fake backend's tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from engine.backends import fake_tokenizer
from engine.backends.fake_tokenizer import VOCAB_SIZE
from protocol import bundle

CONTEXT_LENGTH = 640

#: Beyond what all have.
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SETTINGS: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": CONTEXT_LENGTH,
    },
    "phi": {**_SMALL, "max_position_embeddings": CONTEXT_LENGTH},
    "falcon": {**_SMALL, "max_position_embeddings": CONTEXT_LENGTH, "alibi": True},
    "mixtral": {
        **_SMALL,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": CONTEXT_LENGTH,
        "sliding_window": 64,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


def make(kind: str, folder: Path) -> transformers.PreTrainedModel:
    """Write a model of `kind` into `folder`; returns it, for what it says itself."""
    torch.manual_seed(0)
    special = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}
    # Large weights keep the most likely token well apart from the next.
    settings = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, **special, **SETTINGS[kind]}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    for name, text in bundle.unpack(fake_tokenizer.packed(CONTEXT_LENGTH)).items():
        (folder / name).write_text(text)
    return model


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    """What transformers' own loop generates."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
    )
    return out[0, len(prompt) :].tolist()
