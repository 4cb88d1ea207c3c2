from __future__ import annotations

from pathlib import Path

import pytest

from engine.loading.store import ModelError, ModelFolder


def test_reads_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    folder = ModelFolder(tmp_path)
    assert folder.read_object("config.json") == {"a": 1}
    assert folder.read_text("config.json") == '{"a": 1}'
    assert not folder.has("other.json")


def test_refuses_what_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        ModelFolder(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"{", "is not JSON"), (b"[1]", "must hold a JSON object, not list"), (b"\xff", "is not JSON")],
)
def test_names_the_broken_file(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=text) as caught:
        ModelFolder(tmp_path).read_object("config.json")
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_and_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="is not UTF-8"):
        ModelFolder(tmp_path).read_text("config.json")
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        ModelFolder(tmp_path).read_bytes("other")
