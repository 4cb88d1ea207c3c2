"""The models that the texts name, tiny, where their commands look for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.seeds.models import (
    CONFIG,
    QUANT_CONFIG,
    QUANTIZE_CONFIG,
    Weights,
    pack_awq,
    pack_gptq,
    random_weights,
    split,
    write_folder,
)


@pytest.fixture(scope="session")
def plain() -> Weights:
    return random_weights()


@pytest.fixture(scope="session")
def gptq_weights() -> Weights:
    return random_weights(pack=pack_gptq())


@pytest.fixture(scope="session")
def awq_weights() -> Weights:
    return random_weights(pack=pack_awq)


@pytest.fixture(scope="session")
def machine(
    tmp_path_factory: pytest.TempPathFactory, plain: Weights, gptq_weights: Weights, awq_weights: Weights
) -> Path:
    """A root folder with `models/`, and the folders that are named without a slash in front."""
    root = tmp_path_factory.mktemp("machine")
    write_folder(root / "models/llama-7b-hf", plain.stored)
    large = write_folder(root / "models/llama-70b-hf", plain.stored, CONFIG | {"torch_dtype": "bfloat16"})
    split(large, 3)
    chat = write_folder(root / "meta-llama/Llama-2-7b-chat-hf", plain.stored)
    split(chat, 2)
    gptq = write_folder(root / "models/llama-2-7b-gptq", gptq_weights.stored)
    (gptq / "quantize_config.json").write_text(json.dumps(QUANTIZE_CONFIG))
    shutil.copytree(gptq, root / "TheBloke/Llama-2-13B-chat-GPTQ")
    mistral = CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    for name, config in (("models/mistral-7b-awq", mistral), ("llama-3-8b-awq", CONFIG)):
        folder = write_folder(root / name, awq_weights.stored, config)
        (folder / "quant_config.json").write_text(json.dumps(QUANT_CONFIG))
    # A model that is not quantized, whatever the command says.
    write_folder(root / "Qwen/Qwen-7B-Chat", plain.stored)
    return root
