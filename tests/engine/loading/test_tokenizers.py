from __future__ import annotations

from pathlib import Path

import pytest

from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from protocol import bundle


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
