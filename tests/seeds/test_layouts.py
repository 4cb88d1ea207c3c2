"""Every file and layout that the texts name: what is there is served, what is missing is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from protocol import bundle
from tests.engine.tiny_models import VOCAB_SIZE, character
from tests.seeds.models import Weights, split, write_folder
from tests.seeds.serving import SHORT, served

pytestmark = pytest.mark.timeout(300)

#: The folder of the text's case, from the original to a quantized model; no index, no other file.
AFTER_AUTOAWQ = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def served_ids(folder: Path, kernel_cache: Path) -> list[int]:
    ids, _ = served([str(folder), *SHORT, f"--cache-dir={kernel_cache}"])
    return ids


@pytest.fixture(scope="module")
def expected(machine: Path, kernel_cache: Path) -> list[int]:
    """What the plain model in one file says."""
    return served_ids(machine / "models/llama-7b-hf", kernel_cache)


@pytest.fixture
def folder(plain: Weights, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "my_model", plain.stored)


def test_safetensors_in_three_files(folder: Path, kernel_cache: Path, expected: list[int]) -> None:
    split(folder, 3)
    assert served_ids(folder, kernel_cache) == expected


def test_three_files_without_an_index(folder: Path, kernel_cache: Path, expected: list[int]) -> None:
    """As the text's tree has it."""
    split(folder, 3)
    (folder / "model.safetensors.index.json").unlink()
    assert served_ids(folder, kernel_cache) == expected


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_is_missing_is_named(folder: Path, kernel_cache: Path, index: bool) -> None:
    split(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing.*[Ff]etch"):
        served_ids(folder, kernel_cache)


@pytest.mark.parametrize("count", [1, 2])
def test_pytorch_model_bin(folder: Path, plain: Weights, kernel_cache: Path, expected: list[int], count: int) -> None:
    (folder / "model.safetensors").unlink()
    write_bin(folder, plain.stored, count)
    assert served_ids(folder, kernel_cache) == expected


def write_bin(folder: Path, tensors: Mapping[str, Tensor], count: int) -> None:
    if count == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
        return
    weight_map = {}
    for number in range(count):
        part = {name: tensors[name] for name in sorted(tensors)[number::count]}
        file = f"pytorch_model-{number + 1:05}-of-{count:05}.bin"
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_format_is_read_from_the_files_not_from_their_names(
    folder: Path, gptq_weights: Weights, kernel_cache: Path, machine: Path
) -> None:
    """A folder called awq with weights in `gptq_model-4bit-128g.safetensors`, as older tools name them."""
    shutil.copy(machine / "models/llama-2-7b-gptq/quantize_config.json", folder)
    (folder / "model.safetensors").unlink()
    save_file(gptq_weights.stored, folder / "awq-8bit.safetensors")
    expected = served_ids(machine / "models/llama-2-7b-gptq", kernel_cache)
    assert served_ids(folder.rename(folder.with_name("model-awq")), kernel_cache) == expected


def test_the_folder_after_autoawq(machine: Path, awq_weights: Weights, kernel_cache: Path, tmp_path: Path) -> None:
    folder = machine / "llama-3-8b-awq"
    assert {file.name for file in folder.iterdir()} == AFTER_AUTOAWQ
    assert served_ids(folder, kernel_cache) == served_ids(
        write_folder(tmp_path / "plain", awq_weights.plain), kernel_cache
    )


def test_vocab_txt(folder: Path, kernel_cache: Path, expected: list[int]) -> None:
    (folder / "tokenizer.json").unlink()
    words = ["[PAD]", "[UNK]", "[SEP]", "hello", "world", "##s"]
    (folder / "vocab.txt").write_text("\n".join([*words, *map(character, range(6, VOCAB_SIZE))]) + "\n")
    assert served_ids(folder, kernel_cache) == expected
    tokenizer = Tokenizer.from_str(bundle.unpack(tokenizer_bundle(ModelFolder(folder)))["tokenizer.json"])
    assert tokenizer.encode("Hello worlds").ids == [3, 4, 5]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "has no config.json; name a folder in the Hugging Face layout"),
        (
            "tokenizer.json",
            "has no tokenizer.json, nor what one is made of: tokenizer.model, vocab.json and merges.txt",
        ),
        ("model.safetensors", "has no weights: neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_file_that_must_be_there_is_named(folder: Path, kernel_cache: Path, name: str, text: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError) as caught:
        served_ids(folder, kernel_cache)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_files_that_may_be_missing(folder: Path, kernel_cache: Path, expected: list[int], name: str) -> None:
    (folder / name).unlink()
    assert served_ids(folder, kernel_cache) == expected
