from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.loading.store import ModelError, ModelFolder
from engine.loading.weight_files import weight_files


def folder(path: Path, *names: str) -> ModelFolder:
    for name in ("config.json", *names):
        (path / name).write_text("{}")
    return ModelFolder(path)


def chosen(model: ModelFolder, load_format: str = "auto") -> tuple[str, list[str]]:
    found = weight_files(model, load_format)
    return found.format, [file.name for file in found.files]


@pytest.mark.parametrize(
    ("names", "load_format", "expected"),
    [
        (("model.safetensors", "pytorch_model.bin", "x.gguf"), "auto", ("safetensors", ["model.safetensors"])),
        (("pytorch_model.bin", "x.gguf"), "auto", ("pt", ["pytorch_model.bin"])),
        (("x.gguf",), "auto", ("gguf", ["x.gguf"])),
        (("model.safetensors", "pytorch_model.bin"), "pt", ("pt", ["pytorch_model.bin"])),
        (("model.safetensors", "x.gguf"), "gguf", ("gguf", ["x.gguf"])),
        (("gptq_model-4bit-128g.safetensors",), "auto", ("safetensors", ["gptq_model-4bit-128g.safetensors"])),
        (("b.safetensors", "a.safetensors", "consolidated.safetensors"), "auto", None),
        (("training_args.bin", "weights.bin"), "auto", ("pt", ["weights.bin"])),
        (("model.pt",), "pt", ("pt", ["model.pt"])),
    ],
)
def test_order(
    tmp_path: Path, names: tuple[str, ...], load_format: str, expected: tuple[str, list[str]] | None
) -> None:
    expected = expected or ("safetensors", ["a.safetensors", "b.safetensors"])
    assert chosen(folder(tmp_path, *names), load_format) == expected


@pytest.mark.parametrize(("index", "suffix"), [("model.safetensors", "safetensors"), ("pytorch_model.bin", "bin")])
def test_index(tmp_path: Path, index: str, suffix: str) -> None:
    model = folder(tmp_path, f"b.{suffix}", f"a.{suffix}", f"other.{suffix}")
    weight_map = {"x": f"b.{suffix}", "y": f"a.{suffix}", "z": f"b.{suffix}"}
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert chosen(model)[1] == [f"a.{suffix}", f"b.{suffix}"]
    (tmp_path / f"a.{suffix}").unlink()
    with pytest.raises(ModelError, match=rf"a\.{suffix} is missing: {index}\.index\.json lists it"):
        weight_files(model, "auto")


def test_shard_that_is_missing_without_an_index(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    model = folder(tmp_path, *names)
    assert chosen(model) == ("safetensors", names)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing: model-00001.* 3 such files"):
        weight_files(model, "auto")


def test_no_weights(tmp_path: Path) -> None:
    model = folder(tmp_path, "training_args.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*pytorch_model\.bin.*Fetch the model again"):
        weight_files(model, "auto")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ModelError, match=r"has no weights: .*\. --load-format pt reads what is there"):
        weight_files(model, "safetensors")
