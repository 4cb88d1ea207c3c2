"""The torch runner on a GPU: transformers' ids, and the same bits in any composition of steps. `pytest -m gpu`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.device import gpu_inputs
from protocol.sampling import SamplingParams
from tests.engine.family_models import NUM_NEW as NEW_OF_FAMILIES
from tests.engine.family_models import VARIANTS
from tests.engine.family_models import prompt as prompt_of_families
from tests.engine.quant.test_kv_cache import calibrated
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import EOS_ID, NUM_NEW, PROMPT_LENGTHS, prompt
from tests.engine.torch_runners import Settings, driver, load

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ALL = range(len(PROMPT_LENGTHS))


def gpu_settings(model: Path, dtype: str, cache: Path) -> Settings:
    return Settings(
        str(model),
        dtype=dtype,
        device="cuda",
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=64 * 2**20,
        cache_dir=cache,
    )


@pytest.mark.parametrize("variant", ["llama_tied", "llama_untied", "llama_bias"])
@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_ids_are_those_of_transformers(tiny_models: Path, kernel_cache: Path, variant: str, depth: int) -> None:
    golden = json.loads((tiny_models / "golden.json").read_text())[variant]
    runner, info = load(gpu_settings(tiny_models / variant, "float32", kernel_cache))
    assert runner.max_in_flight == 2
    greedy = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    sequences = [Sequence(prompt(number), greedy, ends=(EOS_ID,)) for number in ALL]
    assert driver(runner, info).run(sequences, depth=depth) == golden["ids"]


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2_tied",
        "qwen2_window",
        "qwen3_bias",
        "mistral_window",
        "llama_yarn",
        "gemma2",
        "phi3_longrope_long",
        "mixtral_window",
        "qwen3_moe_sparse",
        "qwen",
    ],
)
def test_greedy_ids_of_other_families(family_models: Path, kernel_cache: Path, variant: str) -> None:
    golden = json.loads((family_models / "golden.json").read_text())[variant]
    runner, info = load(gpu_settings(family_models / variant, "float32", kernel_cache))
    greedy = SamplingParams(max_tokens=NEW_OF_FAMILIES, min_tokens=NEW_OF_FAMILIES, temperature=0.0)
    sequences = [Sequence(prompt_of_families(n), greedy, ends=(EOS_ID,)) for n in VARIANTS[variant].prompts]
    assert driver(runner, info).run(sequences, depth=2) == golden["ids"]


@pytest.mark.parametrize("variant", ["qwen2_window", "gemma2", "qwen3_moe_sparse", "qwen"])
def test_greedy_ids_of_other_families_without_graphs_of_chunks(
    family_models: Path, kernel_cache: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the last layer has sampled rows alone."""
    monkeypatch.setattr(gpu_inputs, "chunk_layouts", lambda *sizes: [])
    test_greedy_ids_of_other_families(family_models, kernel_cache, variant)


def sampling(number: int, *, plain: bool) -> SamplingParams:
    """Parameters that differ from prompt to prompt; with `plain` those that a graph's sampler does alone."""
    basic = SamplingParams(
        max_tokens=20,
        temperature=(0.0, 0.7, 1.3)[number % 3],
        top_k=(0, 0, 9)[number % 3],
        top_p=(1.0, 0.9)[number % 2],
        min_p=(0.0, 0.02, 0.0, 0.0)[number % 4],
    )
    if plain:
        return basic
    return SamplingParams(
        max_tokens=20,
        min_tokens=number % 5,
        temperature=basic.temperature,
        top_k=basic.top_k,
        top_p=basic.top_p,
        min_p=basic.min_p,
        repetition_penalty=(1.0, 1.3)[number // 2 % 2],
        presence_penalty=(0.0, 0.4, 0.0)[number % 3],
        frequency_penalty=(0.0, 0.0, 0.2, 0.0)[number % 4],
        logit_bias=((4, 1.5), (9, -2.0)) if number % 5 == 4 else (),
        allowed_token_ids=tuple(range(3, 90)) if number % 7 == 6 else (),
        logprobs=3,
    )


def sequences(plain: bool) -> list[Sequence]:
    return [Sequence(prompt(n), sampling(n, plain=plain), seed=77 * n - 200, ends=(2, 11)) for n in ALL]


def results(of: list[Sequence]) -> list[object]:
    return [(s.generated, s.logprobs) for s in of]


class Case:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.driver = driver(*load(settings))
        self.alone = {
            plain: results([self.driver.run_alone(sequence) for sequence in sequences(plain)])
            for plain in (True, False)
        }


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def case(request: pytest.FixtureRequest, tiny_models: Path, kernel_cache: Path) -> Case:
    return Case(gpu_settings(tiny_models / "llama_bias", request.param, kernel_cache))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [10**9, 64, 7])
def test_bits_are_the_same_together_and_in_chunks(case: Case, plain: bool, depth: int, chunk: int) -> None:
    together = sequences(plain)
    case.driver.run(together, depth=depth, chunk=chunk)
    assert results(together) == case.alone[plain]


@pytest.mark.parametrize("plain", [True, False])
def test_bits_are_the_same_after_preemption(case: Case, plain: bool) -> None:
    together = sequences(plain)
    for number, sequence in enumerate(together):
        sequence.preempt_after = number % 4 + 1
    case.driver.run(together, depth=2)
    assert results(together) == case.alone[plain]


def test_bits_are_the_same_without_graphs_of_chunks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts in one step; then single tokens beside those of preempted sequences."""
    monkeypatch.setattr(gpu_inputs, "chunk_layouts", lambda *sizes: [])
    without = driver(*load(case.settings))
    for plain in (True, False):
        together = sequences(plain)
        for number, sequence in enumerate(together):
            sequence.preempt_after = number % 4 + 1
        without.run(together, depth=2)
        assert results(together) == case.alone[plain]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case_with_fp8(
    request: pytest.FixtureRequest,
    tiny_models: Path,
    tmp_path_factory: pytest.TempPathFactory,
    kernel_cache: Path,
) -> Case:
    model = calibrated(tiny_models / "llama_bias", tmp_path_factory.mktemp("fp8") / "m")
    settings = gpu_settings(model, request.param, kernel_cache)
    return Case(replace(settings, kv_cache_dtype="fp8"))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("chunk", [10**9, 7])
def test_bits_are_the_same_with_an_fp8_pool(case_with_fp8: Case, plain: bool, chunk: int) -> None:
    together = sequences(plain)
    for number, sequence in enumerate(together):
        sequence.preempt_after = number % 4 + 1
    case_with_fp8.driver.run(together, depth=2, chunk=chunk)
    assert results(together) == case_with_fp8.alone[plain]


def test_greedy_ids_with_an_fp8_pool_are_those_of_a_cpu(tiny_models: Path, tmp_path: Path, kernel_cache: Path) -> None:
    model = calibrated(tiny_models / "llama_bias", tmp_path / "m")
    greedy = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    on_gpu = gpu_settings(model, "float32", kernel_cache)  # "auto": the checkpoint asks for it
    found = []
    for settings in (on_gpu, replace(on_gpu, device="cpu")):
        some = [Sequence(prompt(number), greedy, ends=(EOS_ID,)) for number in ALL]
        found.append(driver(*load(settings)).run(some))
    assert found[0] == found[1]
    with_scales_of_one = driver(*load(replace(on_gpu, model=str(tiny_models / "llama_bias"), kv_cache_dtype="fp8")))
    assert with_scales_of_one.run([Sequence(prompt(n), greedy, ends=(EOS_ID,)) for n in ALL]) != found[0]
