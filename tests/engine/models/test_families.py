"""Every family and kind of rope against transformers: greedy ids in float32, exactly, however steps are composed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.torch_runner import TorchRunner
from engine.config import EngineConfig
from engine.loading.store import ModelError
from engine.plan import ModelInfo
from engine.preflight import check
from engine.preflight.devices import Device
from engine.preflight.wanted import Wanted
from protocol.sampling import SamplingParams
from tests.engine.family_models import CONTEXT_LENGTH, NUM_NEW, PROMPT_LENGTHS, STACKED, VARIANTS, prompt
from tests.engine.sequences import Driver, Sequence
from tests.engine.tiny_models import EOS_ID
from tests.engine.torch_runners import Settings, driver, load

#: The first test also makes the models and may build the kernels.
pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """A loaded variant and what transformers made of its prompts."""

    runner: TorchRunner
    info: ModelInfo
    prompts: list[list[int]]
    ids: list[list[int]]
    logprobs: list[list[float]]

    @property
    def driver(self) -> Driver:
        return driver(self.runner, self.info)

    def sequences(self, sampling: SamplingParams = GREEDY) -> list[Sequence]:
        return [Sequence(ids, sampling, ends=(EOS_ID,)) for ids in self.prompts]


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, family_models: Path, kernel_cache: Path) -> Case:
    return open_case(family_models, family_models / request.param, request.param, kernel_cache)


def open_case(family_models: Path, folder: Path, name: str, kernel_cache: Path) -> Case:
    variant = VARIANTS[name]
    runner, info = load(Settings(str(folder), max_model_len=variant.max_model_len, cache_dir=kernel_cache))
    golden = json.loads((family_models / "golden.json").read_text())[name]
    return Case(runner, info, [prompt(number) for number in variant.prompts], golden["ids"], golden["logprobs"])


def test_alone(case: Case) -> None:
    assert [case.driver.run_alone(sequence).generated for sequence in case.sequences()] == case.ids


def test_together(case: Case) -> None:
    assert case.driver.run(case.sequences()) == case.ids


def test_in_chunks_of_7(case: Case) -> None:
    assert case.driver.run(case.sequences(), chunk=7, depth=2) == case.ids


def test_behind_a_cached_prefix(case: Case) -> None:
    run = case.driver
    for sequence, ids in zip(case.sequences(), case.ids, strict=True):
        run.run_alone(sequence)
        whole = (len(sequence.prompt) - 1) // case.info.block_size
        hit = Sequence(sequence.prompt, GREEDY, ends=(EOS_ID,), cached=sequence.blocks[:whole])
        assert run.run_alone(hit).generated == ids


def test_preempted(case: Case) -> None:
    sequences = [replace(sequence, preempt_after=2 + n) for n, sequence in enumerate(case.sequences())]
    assert case.driver.run(sequences, chunk=64) == case.ids


def test_logprobs(case: Case) -> None:
    sequences = case.sequences(SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    case.driver.run(sequences)
    for sequence, logprobs in zip(sequences, case.logprobs, strict=True):
        expected = np.array(logprobs)
        _, _, top_ids, top = sequence.logprobs[0]
        assert np.argmax(expected) == top_ids[0]
        np.testing.assert_allclose(top, expected[list(top_ids)], atol=5e-5)


#: A variant of each family.
FAMILIES = (
    "qwen2_window",
    "qwen3",
    "mistral_window",
    "phi3_longrope_long",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "qwen_long",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_in_bfloat16_do_not_depend_on_the_steps(family_models: Path, kernel_cache: Path, name: str) -> None:
    length = VARIANTS[name].max_model_len
    found = load(
        Settings(str(family_models / name), dtype="bfloat16", max_model_len=length, cache_dir=kernel_cache),
    )
    sampling = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, logprobs=3)

    def results(*, chunk: int = 10**9, depth: int = 1, preempt: bool = False, alone: bool = False) -> list[object]:
        run = driver(*found)
        sequences = [
            Sequence(prompt(n), sampling, seed=n, ends=(EOS_ID,), preempt_after=2 + n if preempt else None)
            for n in range(len(PROMPT_LENGTHS))
        ]
        for group in [[each] for each in sequences] if alone else [sequences]:
            run.run(group, chunk=chunk, depth=depth)
        return [(sequence.generated, sequence.logprobs) for sequence in sequences]

    alone = results(alone=True)
    assert results() == alone
    assert results(chunk=7, depth=2) == alone
    assert results(chunk=64, preempt=True) == alone


def edited(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with another config.json."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_in_the_older_spellings(family_models: Path, tmp_path: Path, kernel_cache: Path, key: str) -> None:
    def age(values: dict[str, Any]) -> None:
        scaling = values.pop("rope_parameters")
        values.update(rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
        scaling[key] = scaling.pop("rope_type")

    folder = edited(family_models / "llama_yarn", tmp_path / "old", age)
    old = open_case(family_models, folder, "llama_yarn", kernel_cache)
    assert old.driver.run(old.sequences()) == old.ids


def test_gemma3_in_the_older_spelling(family_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    def age(values: dict[str, Any]) -> None:
        del values["rope_parameters"], values["layer_types"]
        values.update(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
        values.update(sliding_window_pattern=2)

    old = open_case(family_models, edited(family_models / "gemma3", tmp_path / "old", age), "gemma3", kernel_cache)
    assert old.driver.run(old.sequences()) == old.ids


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("qwen_long", "use_logn_attn", False),
        ("qwen_long", "use_dynamic_ntk", False),
    ],
)
def test_what_is_special_would_be_missed(
    family_models: Path, tmp_path: Path, kernel_cache: Path, name: str, field: str, value: object
) -> None:
    def leave_out(values: dict[str, Any]) -> None:
        values[field] = value

    other = open_case(family_models, edited(family_models / name, tmp_path / "x", leave_out), name, kernel_cache)
    sequences = other.sequences(SamplingParams(max_tokens=1, temperature=0.0, logprobs=1))
    other.driver.run(sequences)
    found = [sequence.logprobs[0][3][0] for sequence in sequences]
    assert np.abs(np.array(found) - [max(each) for each in other.logprobs]).max() > 0.01


@pytest.mark.parametrize("name", STACKED)
def test_experts_as_transformers_5_holds_them(family_models: Path, kernel_cache: Path, name: str) -> None:
    stacked = open_case(family_models, family_models / f"{name}_stacked", name, kernel_cache)
    assert stacked.driver.run(stacked.sequences()) == stacked.ids
    assert check(family_models / f"{name}_stacked", Wanted.by(EngineConfig(model="x"), Device("cpu", "CPU"))).ok


def test_context_lengths(family_models: Path, kernel_cache: Path) -> None:
    def length(name: str, asked: int | None = None) -> int:
        return load(Settings(str(family_models / name), max_model_len=asked, cache_dir=kernel_cache))[1].context_length

    assert length("llama_yarn") == 4 * 160
    assert length("phi3_longrope_short") == CONTEXT_LENGTH
    assert length("llama_linear") == 4 * CONTEXT_LENGTH
    assert (length("llama_dynamic"), length("llama_dynamic", 2 * CONTEXT_LENGTH)) == (
        CONTEXT_LENGTH,
        2 * CONTEXT_LENGTH,
    )


def test_numerics_know_the_length_where_rows_of_the_table_do(family_models: Path, kernel_cache: Path) -> None:
    def numerics(name: str, asked: int) -> str:
        return load(Settings(str(family_models / name), max_model_len=asked, cache_dir=kernel_cache))[1].numerics

    assert numerics("llama_dynamic", 100) == numerics("llama_dynamic", 640) != numerics("llama_dynamic", 641)
    assert numerics("llama_longrope_long", 32) == numerics("llama_longrope_long", 64)
    assert numerics("llama_longrope_long", 64) != numerics("llama_longrope_long", 65)
    assert numerics("llama_yarn", 100) == numerics("llama_yarn", 640)


@pytest.mark.parametrize(
    ("name", "architecture", "text"),
    [
        ("qwen2_tied", "LlamaForCausalLM", r"holds model.layers.0.self_attn.k_proj.bias and 8 more"),
        ("mistral_window", "Qwen2ForCausalLM", "hold no model.layers.0.self_attn.q_proj.bias"),
        ("mistral_window", "Qwen3ForCausalLM", "hold no model.layers.0.self_attn.q_norm.weight"),
        ("gemma3", "Qwen3ForCausalLM", "rope_parameters.full_attention is .*; supported is null"),
        ("qwen3", "Gemma3ForCausalLM", "sliding_window is null, and layers are of the type sliding_attention"),
    ],
)
def test_weights_of_another_family_are_refused_by_name(
    family_models: Path, tmp_path: Path, kernel_cache: Path, name: str, architecture: str, text: str
) -> None:
    def change(values: dict[str, Any]) -> None:
        values.update(architectures=[architecture], layer_types=None)

    folder = edited(family_models / name, tmp_path / "other", change)
    with pytest.raises(ModelError, match=text):
        load(Settings(str(folder), cache_dir=kernel_cache))
