"""A folder as Qwen-7B-Chat-GPTQ has it, small: its own tokenizer, no template, GPTQ described in a file of its own."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.torch_runner import TorchRunner
from engine.config import EngineConfig
from engine.plan import ModelInfo
from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.wanted import Wanted
from gateway.templates import ChatTemplate
from gateway.tokenizer import Tokenizer
from protocol import bundle
from protocol.sampling import SamplingParams
from tests.engine.family_models import QWEN
from tests.engine.quant.packers import gptq
from tests.engine.qwen_reference import QwenReference
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import SETTINGS
from tests.engine.torch_runners import Settings, driver, load

pytestmark = pytest.mark.timeout(300)

NUM_NEW = 12
VOCAB_SIZE = 512

#: What the vocabulary has beside 256 bytes; ranks follow.
TOKENS = (b"he", b"ll", b"hell", b"hello")
END, START, STOP = (256 + len(TOKENS) + place for place in range(3))  # <|endoftext|>, <|im_start|>, <|im_end|>


@dataclass(frozen=True)
class Made:
    folder: Path
    weights: dict[str, Tensor]  # what the quantized ones stand for


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("qwen") / "Qwen-7B-Chat-GPTQ"
    remote = {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}
    config = {name: value for name, value in SETTINGS.items() if not name.endswith("_token_id")}
    config |= QWEN | {"vocab_size": VOCAB_SIZE, "intermediate_size": 256, "auto_map": remote}
    QwenReference(config).save_pretrained(folder)
    weights = quantize(folder / "model.safetensors")
    ranked = [bytes([byte]) for byte in range(256)] + list(TOKENS)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranked)]
    (folder / "qwen.tiktoken").write_text("\n".join(lines))
    described: dict[str, dict[str, Any]] = {
        "quantize_config": {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True},
        "tokenizer_config": {
            "model_max_length": 8192,
            "tokenizer_class": "QWenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
        },
        "generation_config": {
            "chat_format": "chatml",
            "eos_token_id": END,
            "pad_token_id": END,
            "max_window_size": 6144,
            "do_sample": True,
            "top_k": 0,
            "top_p": 0.8,
        },
    }
    for name, values in described.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return Made(folder, weights)


def quantize(file: Path) -> dict[str, Tensor]:
    """The layers' matrices to 4 bits, each with a bias of zeros if it had none, as older tools write it. Answers the
    weights that they stand for.
    """
    weights, stored = {}, {}
    for seed, (name, tensor) in enumerate(load_file(file).items()):
        if not (tensor.dim() == 2 and name.startswith("transformer.h.")):
            weights[name] = stored[name] = tensor
            continue
        module = name.removesuffix("weight")
        packed = gptq(*tensor.shape, seed=seed)
        weights[name] = packed.weight
        stored |= {f"{module}{end}": value for end, value in packed.tensors.items()}
        stored.setdefault(f"{module}bias", torch.zeros(tensor.shape[0]))
    stored |= {name: tensor for name, tensor in weights.items() if name.endswith(".bias")}
    save_file(stored, file, metadata={"format": "pt"})
    return weights


@pytest.fixture(scope="module")
def loaded(made: Made, kernel_cache: Path) -> tuple[TorchRunner, ModelInfo]:
    return load(Settings(str(made.folder), quantization="gptq", cache_dir=kernel_cache))


def test_ids_are_those_of_the_reference(made: Made, loaded: tuple[TorchRunner, ModelInfo]) -> None:
    reference = QwenReference(json.loads((made.folder / "config.json").read_text()), made.weights)
    greedy = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    prompts = [[3 + (11 * n + 17 * place) % 250 for place in range(n)] for n in (1, 17, 100)]
    found = driver(*loaded).run([Sequence(prompt, greedy, ends=(END,)) for prompt in prompts])
    assert found == [reference.greedy_ids(prompt, NUM_NEW, END) for prompt in prompts]
    assert len({tuple(each) for each in found}) == len(prompts)


def test_a_look_before_it_is_loaded(made: Made) -> None:
    report = check(made.folder, Wanted.by(EngineConfig(model=str(made.folder)), Device("cpu", "CPU")))
    assert report.problems == []


def test_chat(loaded: tuple[TorchRunner, ModelInfo]) -> None:
    info = loaded[1]
    assert info.eos_ids == (END, START, STOP)
    assert info.generation_defaults == {"top_k": 0, "top_p": 0.8}
    files = bundle.unpack(info.bundle)
    tokenizer = Tokenizer(files)
    text = ChatTemplate(files, tokenizer.config, tokenizer.special_tokens).render(
        [{"role": "user", "content": "hello!"}],
        tools=[],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )
    he, hello = 256, 256 + TOKENS.index(b"hello")
    system = [START, *b"system\nYou are a ", he, *b"lpful assistant.", STOP, *b"\n"]
    question = [START, *b"user\n", hello, *b"!", STOP, *b"\n"]
    ids = asyncio.run(tokenizer.encode(text, add_special_tokens=False, most=100))
    assert list(ids) == [*system, *question, START, *b"assistant\n"]
    assert {END, START, STOP} <= tokenizer.special_ids
