"""`sluicegate models` on a cache that a hub filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.sources import command
from tests.engine.sources.conftest import NEEDED, SHARDS
from tests.engine.sources.servers import HubServer


def run(tmp_path: Path, *words: str) -> int:
    return command.main([*words, "--cache-dir", str(tmp_path)])


def test_pull_list_check_remove(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "pull", hub.name) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert (folder / "config.json").is_file()
    size = sum(len(hub.files[name]) for name in NEEDED)

    assert run(tmp_path, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"model": "acme/tiny", "version": hub.version, "bytes": size, "folder": str(folder)}
    ]
    assert run(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"acme/tiny  {hub.version[:12]}      0.00 GB\n"

    assert run(tmp_path, "check", hub.name) == 0
    assert capsys.readouterr().out.startswith(f"acme/tiny {hub.version[:12]}: 7 files are whole")
    (folder / SHARDS[0]).write_bytes(bytes(150_000))
    (folder / SHARDS[1]).write_bytes(b"short")
    (folder / SHARDS[2]).unlink()
    assert run(tmp_path, "check", hub.name) == 1
    text = capsys.readouterr().err
    assert f"{SHARDS[0]} has the sha256" in text
    assert f"{SHARDS[1]} has 5 bytes instead of 130000" in text
    assert f"{SHARDS[2]} is missing" in text
    assert "Run `sluicegate models remove acme/tiny` and `sluicegate models pull acme/tiny`." in text

    assert run(tmp_path, "remove", hub.name) == 0
    assert not folder.exists()
    assert run(tmp_path, "remove", hub.name) == 1
    assert "acme/tiny is not in" in capsys.readouterr().err
    assert run(tmp_path, "pull", hub.name) == 0


def test_one_version_of_several(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "pull", hub.name)
    old = hub.version
    hub.files["config.json"] = b"{}"
    run(tmp_path, "pull", hub.name)
    assert run(tmp_path, "remove", f"{hub.name}@{old}") == 0
    capsys.readouterr()
    run(tmp_path, "list", "--json")
    assert [row["version"] for row in json.loads(capsys.readouterr().out)] == [hub.version]


@pytest.mark.parametrize("word", ["pull", "check", "remove"])
def test_a_path_is_no_model_of_a_source(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, word, str(tmp_path)) == 1
    assert "is no model of a hub or object store; write ORG/NAME or s3://BUCKET/PREFIX." in capsys.readouterr().err


def test_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"No models in {tmp_path}/models.\n"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "pull" in capsys.readouterr().out
    assert command.main(["fetch"]) == 2
    assert "unknown command 'fetch'" in capsys.readouterr().err
