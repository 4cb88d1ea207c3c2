"""The numerics of a loaded model change with everything that may change a bit of its output."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels
from engine.backends.torch_runner import _Build, _Source
from engine.loading import identity
from engine.plan import ModelInfo
from tests.engine.torch_runners import Settings, load

pytestmark = pytest.mark.timeout(300)


def shift_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")


def edit_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))


def edit_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


@pytest.fixture
def settings(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> Settings:
    shutil.copytree(tiny_models / "llama_untied", tmp_path / "model")
    return Settings(str(tmp_path / "model"), cache_dir=kernel_cache)


def info(settings: Settings) -> ModelInfo:
    return load(settings)[1]


@pytest.mark.parametrize("change", [shift_weights, edit_config, edit_tokenizer])
def test_another_model_is_another_digest_and_other_numerics(settings: Settings, change: Callable[[Path], None]) -> None:
    before = info(settings)
    change(Path(settings.model or ""))
    after = info(settings)
    assert before.digest != after.digest
    assert before.numerics != after.numerics


def test_numerics_change_with_each_ingredient_and_the_digest_does_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = info(settings)
    seen = {"as it is": first}

    def changed(name: str, where: object, attribute: str, value: object, settings: Settings = settings) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(where, attribute, value)
            seen[name] = info(settings)

    seen["dtype bfloat16"] = info(replace(settings, dtype="bfloat16"))
    seen["dtype float16"] = info(replace(settings, dtype="float16"))
    changed("operators", kernels, "numerics_name", lambda: "others")
    changed("machine", platform, "machine", lambda: "riscv64")
    changed("instruction set", torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    changed("torch", torch, "__version__", "9.9.9")
    changed("NUMERICS", identity, "NUMERICS", identity.NUMERICS + 1)
    assert len({each.numerics for each in seen.values()}) == len(seen)
    assert {each.digest for each in seen.values()} == {first.digest}
    assert info(settings).numerics == first.numerics


def test_a_gpu_whose_bits_depend_on_the_batch_has_other_numerics(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "gpu_numerics_name", lambda device: "triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def numerics(*, reproducible: bool) -> str:
        chosen = replace(settings, reproducible=reproducible)
        source = _Source.read(chosen.model, chosen.load_format, chosen.quantization)
        dtype = torch.bfloat16
        build = _Build(
            chosen, source, torch.device("cuda"), stored=dtype, active=dtype, kv_dtype=dtype, context_length=64
        )
        return build.numerics("digest")

    assert numerics(reproducible=True) == numerics(reproducible=True) != numerics(reproducible=False)


def test_on_a_cpu_reproducible_is_all_there_is(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "engine")
    assert info(replace(settings, reproducible=False)).numerics == info(settings).numerics
    assert [record.message for record in caplog.records if "reproducible" in record.message] == [
        "--no-reproducible changes nothing on a CPU: reproducible operators are all there are."
    ]
