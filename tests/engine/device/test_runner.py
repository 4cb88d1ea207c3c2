"""Bits do not depend on the composition of steps: ids and logprobs, alone against everything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.backends.torch_runner import TorchRunner
from engine.plan import ModelInfo
from protocol.sampling import SamplingParams
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import PROMPT_LENGTHS, prompt
from tests.engine.torch_runners import Settings, driver, load

#: The first test also makes the models and may build the kernels.
pytestmark = pytest.mark.timeout(300)

NUM_NEW = 20
ALL = range(len(PROMPT_LENGTHS))


def sampling(number: int) -> SamplingParams:
    """Parameters that differ from prompt to prompt; every rule is used by some."""
    return SamplingParams(
        max_tokens=NUM_NEW,
        min_tokens=number % 5,
        temperature=(0.0, 0.7, 1.3)[number % 3],
        top_k=(0, 0, 9)[number % 3],
        top_p=(1.0, 0.9)[number % 2],
        min_p=(0.0, 0.02, 0.0, 0.0)[number % 4],
        repetition_penalty=(1.0, 1.3)[number // 2 % 2],
        presence_penalty=(0.0, 0.4, 0.0)[number % 3],
        frequency_penalty=(0.0, 0.0, 0.2, 0.0)[number % 4],
        logit_bias=((4, 1.5), (9, -2.0)) if number % 5 == 4 else (),
        allowed_token_ids=tuple(range(3, 90)) if number % 7 == 6 else (),
        logprobs=3,
    )


def sequence(number: int) -> Sequence:
    return Sequence(prompt(number), sampling(number), seed=77 * number - 200, ends=(2, 11))


def results(
    sequences: list[Sequence],
) -> list[tuple[list[int], list[tuple[float, int, tuple[int, ...], tuple[float, ...]]]]]:
    return [(s.generated, s.logprobs) for s in sequences]


class Case:
    """A model loaded once, with what it answers to each prompt alone."""

    def __init__(self, runner: TorchRunner, info: ModelInfo) -> None:
        self.runner, self.info = runner, info
        self.driver = driver(runner, info)
        self.alone = results([self.driver.run_alone(sequence(number)) for number in ALL])


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def case(request: pytest.FixtureRequest, tiny_models: Path, kernel_cache: Path) -> Case:
    settings = Settings(str(tiny_models / "llama_bias"), dtype=request.param, cache_dir=kernel_cache)
    return Case(*load(settings))


def test_sampling_is_diverse(case: Case) -> None:
    assert len({tuple(ids) for ids, _ in case.alone}) == len(ALL)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_together(case: Case, depth: int) -> None:
    together = [sequence(number) for number in ALL]
    case.driver.run(together, depth=depth)
    assert results(together) == case.alone


@pytest.mark.parametrize(("chunk", "depth"), [(7, 1), (7, 2), (64, 1)])
def test_prompts_in_chunks(case: Case, chunk: int, depth: int) -> None:
    together = [sequence(number) for number in ALL]
    case.driver.run(together, chunk=chunk, depth=depth)
    assert results(together) == case.alone


def test_prefix_hit(case: Case) -> None:
    """The same blocks again, as the prefix cache would give them: all full ones before the last token."""
    for number in (4, 9, 10):
        first = sequence(number)
        case.driver.run_alone(first)
        num_full = (len(first.prompt) - 1) // case.info.block_size
        hit = replace(sequence(number), cached=first.blocks[:num_full])
        assert num_full > 0
        assert results([case.driver.run_alone(hit)]) == [case.alone[number]]


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_and_recomputed(case: Case, depth: int) -> None:
    together = [replace(sequence(number), preempt_after=1 + number) for number in ALL]
    case.driver.run(together, chunk=32, depth=depth)
    assert results(together) == case.alone


def test_resumed_with_what_was_generated(case: Case) -> None:
    for number in (1, 3, 6, 8, 14):
        ids, logprobs = case.alone[number]
        rest = replace(sequence(number), resumed=ids[:9])
        case.driver.run_alone(rest)
        assert (rest.generated, rest.logprobs) == (ids, logprobs[9:])


def test_other_threads_and_blocks(
    case: Case, tiny_models: Path, kernel_cache: Path, request: pytest.FixtureRequest
) -> None:
    dtype = request.node.callspec.params["case"]
    settings = Settings(str(tiny_models / "llama_bias"), dtype=dtype, cache_dir=kernel_cache, threads=2, block_size=48)
    runner, info = load(settings)
    assert info.numerics == case.info.numerics
    together = [sequence(number) for number in ALL]
    driver(runner, info, seed=3).run(together, chunk=50)
    assert results(together) == case.alone


def test_a_broken_row_fails_alone(case: Case) -> None:
    """A row without a token to sample is reported; its neighbours go on with the same bits."""
    broken = replace(sequence(0), sampling=SamplingParams(max_tokens=1, min_tokens=1, allowed_token_ids=(2, 11)))
    together = [sequence(1), broken, sequence(2)]
    case.driver.run(together)
    assert broken.failures == [
        "allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to sample"
    ]
    assert results([together[0], together[2]]) == case.alone[1:3]
