from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers

from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from protocol import bundle
from tests.engine.loading.test_sentencepiece import model_file, pieces


def folder(path: Path, **files: str) -> ModelFolder:
    for name, text in {"config": "{}", **files}.items():
        (path / f"{name}.json").write_text(text)
    return ModelFolder(path)


def test_holds_the_tokenizer_files_only(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "model.safetensors").write_text("")
    blob = tokenizer_bundle(folder(tmp_path, tokenizer="{}", tokenizer_config='{"a": 1}'))
    assert bundle.unpack(blob) == {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ x }}",
    }


def test_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        tokenizer_bundle(folder(tmp_path))


def test_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    blob = tokenizer_bundle(folder(tmp_path, tokenizer="{}", chat_template='{"chat_template": "{{ y }}"}'))
    assert bundle.unpack(blob)["chat_template.jinja"] == "{{ y }}"
    with pytest.raises(ModelError, match=r"chat_template\.json must hold a string named chat_template"):
        tokenizer_bundle(folder(tmp_path, tokenizer="{}", chat_template='{"chat_template": 1}'))


def test_chat_format_of_qwen(tmp_path: Path) -> None:
    """Its chat models have the template in code, and say so in generation_config.json."""
    files = {"tokenizer": "{}", "generation_config": '{"chat_format": "chatml"}'}
    source = bundle.unpack(tokenizer_bundle(folder(tmp_path, **files)))["chat_template.jinja"]
    template = jinja2.Environment().from_string(source)
    question = {"role": "user", "content": "Hi"}
    told = {"role": "system", "content": "Be brief."}
    assert template.render(messages=[question], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(messages=[told, question, {"role": "assistant", "content": "Yo"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    )
    for other in ('{"chat_format": "raw"}', "{}"):
        blob = tokenizer_bundle(folder(tmp_path, **files | {"generation_config": other}))
        assert "chat_template.jinja" not in bundle.unpack(blob)
    own = folder(tmp_path, **files, tokenizer_config='{"chat_template": "{{ z }}"}')
    assert "chat_template.jinja" not in bundle.unpack(tokenizer_bundle(own))


def made(model: ModelFolder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(bundle.unpack(tokenizer_bundle(model))["tokenizer.json"])


def test_sentencepiece_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    assert made(folder(tmp_path, tokenizer_config='{"bos_token": "<s>"}')).encode("hello").tokens[0] == "<s>"
    config: dict[str, Any] = {"add_bos_token": False}
    last = len(pieces())
    config["added_tokens_decoder"] = {str(last): {"content": "<|im_end|>", "special": True}}
    tokenizer = made(folder(tmp_path, tokenizer_config=json.dumps(config)))
    assert tokenizer.encode("hello<|im_end|>").ids[-1] == last
    assert tokenizer.encode("hello").tokens[0] != "<s>"
    config["added_tokens_decoder"] = {str(last + 5): {"content": "<|im_end|>", "special": True}}
    with pytest.raises(ModelError, match=rf"'<\|im_end\|>' has the id {last + 5} there and would have {last}"):
        tokenizer_bundle(folder(tmp_path, tokenizer_config=json.dumps(config)))


def test_vocab_and_merges(tmp_path: Path) -> None:
    vocab = json.dumps({"a": 0, "b": 1, "ab": 2, "<|end|>": 3})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    config = json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": {"content": "<|end|>"}})
    tokenizer = made(folder(tmp_path, vocab=vocab, tokenizer_config=config, added_tokens='{"<|more|>": 4}'))
    assert tokenizer.encode("abb<|end|><|more|>").ids == [2, 1, 3, 4]
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == {3}


def test_vocab_txt(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\nhello\n")
    assert made(folder(tmp_path)).encode("HELLO x").ids == [1, 0]
    assert made(folder(tmp_path, tokenizer_config='{"do_lower_case": false}')).encode("HELLO").ids == [0]
