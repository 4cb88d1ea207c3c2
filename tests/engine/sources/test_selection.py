"""Which files a model needs."""

from __future__ import annotations

import json

import pytest

from engine.sources.remote import RemoteFile, SourceError
from engine.sources.selection import select

INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}).encode()


def chosen(*names: str, index: bytes = INDEX) -> set[str]:
    files = {name: RemoteFile(name, len(name)) for name in names}
    return {file.name for file in select(files, lambda file: index)}


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        ({"model.safetensors"}, {"pytorch_model.bin", "consolidated.safetensors", "README.md", "x.gguf"}),
        ({"model.safetensors.index.json", "one.safetensors", "two.safetensors"}, {"three.safetensors", "x.bin"}),
        ({"pytorch_model.bin"}, {"training_args.bin", "tf_model.h5"}),
        ({"pytorch_model.bin.index.json", "one.safetensors", "two.safetensors"}, {"pytorch_model-old.bin"}),
        ({"gptq_model-4bit-128g.safetensors"}, {"adapter_model.safetensors", "consolidated.safetensors"}),
    ],
)
def test_one_form_of_the_weights(weights: set[str], others: set[str]) -> None:
    plain = {"config.json", "generation_config.json", "quantize_config.json", "tokenizer.json", "qwen.tiktoken"}
    assert chosen(*plain, *weights, *others) == plain | weights


@pytest.mark.parametrize(
    ("names", "index", "text"),
    [
        (("model.safetensors",), INDEX, "there is no config.json among its 1 files"),
        (("config.json", "x.gguf"), INDEX, r"no weights in a form that is known.* It has config\.json, x\.gguf\."),
        (
            ("config.json", "model.safetensors.index.json", "one.safetensors"),
            INDEX,
            r"lists 2 shards, of which 1 are not there: two\.safetensors\. Upload them",
        ),
        (("config.json", "model.safetensors.index.json"), b"[]", "is not an index of shards"),
        (("config.json", "model.safetensors.index.json"), b"{", "is not an index of shards"),
        (("config.json", "model.safetensors.index.json"), b'{"weight_map": {}}', "lists 0 shards"),
        (
            ("config.json", "model.safetensors.index.json"),
            b'{"weight_map": {"a": "../b"}}',
            "names '../b', which is not",
        ),
    ],
)
def test_not_a_model(names: tuple[str, ...], index: bytes, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        chosen(*names, index=index)
