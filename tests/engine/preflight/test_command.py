"""`sluicegate check` from its arguments to its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.preflight.command import CheckConfig, main
from tests.engine.preflight.folders import write_model


def test_a_table_and_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "m")
    words = [str(folder), "--gpu-memory-bytes", "80GiB"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "80.00 GiB" in out
    assert out.endswith("It can be served.\n")
    assert main([*words, "--tensor-parallel-size", "3"]) == 1
    out = capsys.readouterr().out
    assert "Total number of attention heads (32) must be divisible by tensor parallel size (3)." in out
    assert out.endswith("problems.\n")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert main([str(folder), "--gpu-memory-bytes", "80GiB", "--max-model-len", "1024", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["model"] == str(folder)
    assert report["problems"][0]["about"] == "files"
    assert report["memory"]["context_length"] == 1024


def test_memory_of_a_gpu_names_the_device() -> None:
    planned = CheckConfig.load(["m", "--gpu-memory-bytes=24GiB"], {}, prog="check")
    assert (planned.device, planned.max_num_seqs, planned.max_num_batched_tokens) == ("cuda", 256, 16384)


def test_a_model_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acme/tiny", "--offline", "--cache-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("sluicegate check: acme/tiny is not in ")
    assert main([str(tmp_path / "none"), "--device=cpu"]) == 1
    assert "is not a directory" in capsys.readouterr().out


def test_a_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["m", "--tensor-paralel-size=2"])
    assert "did you mean --tensor-parallel-size?" in capsys.readouterr().err
