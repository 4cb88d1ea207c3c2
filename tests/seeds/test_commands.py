"""Every command of the texts, with this program's name in the place of vLLM's module.

One that asks for several devices is refused with what to do, and done for one device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.plan import LoadError
from engine.preflight.start import require_one_device, require_servable
from sluicegate_serve import ServeConfig, programs
from tests.seeds import texts
from tests.seeds.commands import CALLS, COMMANDS, options, without_parallel
from tests.seeds.serving import HERE, SHORT, served

#: The first one may build the kernels.
pytestmark = pytest.mark.timeout(300)

SERVED = [command for command in COMMANDS if "Qwen-7B-Chat" not in command]
DIVIDED = [command for command in COMMANDS if "--tensor-parallel-size 1" not in command and command in SERVED]


def located(words: list[str], machine: Path) -> list[str]:
    """The words with /models where the tests have it; other folders are found from the working directory."""
    return [f"{machine}{word}" if word.startswith("/models/") else word for word in words]


@pytest.fixture
def at_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(machine)
    return machine


def test_no_command_and_no_call_is_left_out() -> None:
    text = texts.read_texts()
    assert texts.commands(text) == list(COMMANDS)
    assert texts.calls(text) == list(CALLS)


@pytest.mark.parametrize("command", COMMANDS)
def test_serve_passes_every_flag_on_to_the_engine(command: str, tmp_path: Path) -> None:
    words = options(command)
    config = ServeConfig.load(words, {}, prog="sluicegate serve")
    given = dict(zip((word.removeprefix("--").replace("-", "_") for word in words[::2]), words[1::2], strict=True))
    for name, value in given.items():
        assert getattr(config, name) == type(getattr(config, name))(value)
    (engine,), _ = programs(config, tmp_path)
    passed = EngineConfig.load([*engine.argv[5:]], {}, prog="sluicegate engine")
    assert {name: getattr(passed, name) for name in given} == {name: getattr(config, name) for name in given}


@pytest.mark.parametrize("command", SERVED)
def test_it_is_served_on_one_device(command: str, at_home: Path, kernel_cache: Path) -> None:
    words = [*located(without_parallel(options(command)), at_home), f"--cache-dir={kernel_cache}"]
    ids, info = served([*words, *(HERE if "--max-model-len" in command else SHORT)], num_tokens=4)
    assert len(ids) == 4
    assert info.context_length == (8192 if "--max-model-len" in command else 512)


@pytest.mark.parametrize("command", DIVIDED)
def test_it_is_refused_on_several_devices_with_what_to_do(command: str, at_home: Path) -> None:
    config = EngineConfig.load([*located(options(command), at_home), *HERE], {}, prog="sluicegate engine")
    assert config.model is not None
    refusal = (
        f"--tensor-parallel-size {config.tensor_parallel_size}: an engine runs a model on one device so far. "
        "Leave it out, or set it to 1."
    )
    with pytest.raises(ModelError) as caught:
        require_servable(Path(config.model), config.model_copy(update={"max_model_len": 512}))
    assert str(caught.value) == f"{config.model}: {refusal}"
    with pytest.raises(ModelError) as caught:
        require_one_device(config)
    assert str(caught.value) == refusal


def test_a_quantization_that_the_model_has_not(at_home: Path) -> None:
    """`--model Qwen/Qwen-7B-Chat --quantization gptq`: the quantized model is another, Qwen-7B-Chat-GPTQ."""
    (command,) = set(COMMANDS) - set(SERVED)
    config = EngineConfig.load([*options(command), *SHORT], {}, prog="sluicegate engine")
    with pytest.raises(LoadError) as caught:
        require_servable(Path(str(config.model)), config)
    assert str(caught.value) == (
        "Qwen/Qwen-7B-Chat: --quantization gptq: nothing in Qwen/Qwen-7B-Chat says that its weights are quantized. "
        "config.json has no quantization_config, and there is neither quantize_config.json nor quant_config.json. Copy "
        "the file that the quantizing tool wrote into the folder, or leave --quantization out if the weights are plain."
    )
