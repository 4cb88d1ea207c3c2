from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from protocol.config import SettingsError


def config(*flags: str) -> EngineConfig:
    return EngineConfig.load(["model", *flags], {}, prog="engine")


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("auto", "auto"),
        ("half", "float16"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float", "float32"),
        ("float32", "float32"),
    ],
)
def test_dtype_by_all_its_names(asked: str, dtype: str) -> None:
    assert config(f"--dtype={asked}").dtype == dtype


@pytest.mark.parametrize(
    ("flag", "known"), [("--dtype=int8", "bfloat16"), ("--quantization=squeezellm", "gptq"), ("--load-format=x", "pt")]
)
def test_names_that_are_not_known(flag: str, known: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag.partition('=')[0]}: .*'{known}'"):
        config(flag)


def test_reproducible_by_default() -> None:
    assert [config(*flags).reproducible for flags in ((), ("--no-reproducible",))] == [True, False]
    assert not EngineConfig.load(["model"], {"SLUICEGATE_REPRODUCIBLE": "false"}, prog="engine").reproducible


def test_what_loading_does_by_itself() -> None:
    assert (config().load_format, config().dtype, config().quantization) == ("auto", "auto", None)


@pytest.mark.parametrize(
    ("flags", "has_driver", "sizes"),
    [
        ((), False, (64, 256)),
        ((), True, (256, 16384)),
        (("--device=cpu",), True, (64, 256)),
        (("--device=cuda",), False, (256, 16384)),
        (("--device=cuda", "--max-num-seqs=8"), False, (8, 16384)),
    ],
)
def test_sizes_of_a_step_are_the_devices(
    flags: tuple[str, ...], has_driver: bool, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    if has_driver:
        driver.touch()
    monkeypatch.setattr("engine.config._DRIVER", driver)
    found = config(*flags)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == sizes
    again = EngineConfig.load(found.to_argv(EngineConfig), {}, prog="engine")
    assert again == found
