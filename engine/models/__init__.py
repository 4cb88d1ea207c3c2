"""The registry of model families, by the name config.json has under `architectures`.

A family is one file with a `FAMILY`: how its config becomes a ModelSpec, and what its weights
are called. Entries are strings, imported on use.
"""

from __future__ import annotations

import importlib

from engine.loading.store import ModelError
from engine.models.spec import Family

FAMILIES = {
    "Gemma2ForCausalLM": "engine.models.gemma2:FAMILY",
    "Gemma3ForCausalLM": "engine.models.gemma3:FAMILY",
    "LlamaForCausalLM": "engine.models.llama:FAMILY",
    "MistralForCausalLM": "engine.models.mistral:FAMILY",
    "MixtralForCausalLM": "engine.models.mixtral:FAMILY",
    "Phi3ForCausalLM": "engine.models.phi3:FAMILY",
    "QWenLMHeadModel": "engine.models.qwen:FAMILY",
    "Qwen2ForCausalLM": "engine.models.qwen2:FAMILY",
    "Qwen3ForCausalLM": "engine.models.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": "engine.models.qwen3_moe:FAMILY",
}


def family_of(architectures: object) -> Family:
    """The family of a config's `architectures` value. Raises ModelError naming what is supported."""
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            module, attribute = FAMILIES[name].split(":")
            family: Family = getattr(importlib.import_module(module), attribute)
            return family
    raise ModelError(f"config.json: architectures is {architectures!r}; supported here: {', '.join(sorted(FAMILIES))}.")
