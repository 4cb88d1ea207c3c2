"""Mixtures of experts in whole models: bits in bfloat16, and the memory that loading takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.sampling import SamplingParams
from tests.engine.family_models import NUM_NEW, VARIANTS, prompt
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import EOS_ID
from tests.engine.torch_runners import Settings, driver, load

#: The first test also makes the models and may build the kernels.
pytestmark = pytest.mark.timeout(300)

SAMPLING = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.8, logprobs=5)


def answers(sequences: list[Sequence]) -> list[tuple[object, object]]:
    """Ids and logprobs, which are compared bit for bit."""
    return [(sequence.generated, sequence.logprobs) for sequence in sequences]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_sparse"])
def test_no_composition_changes_a_bit_in_bfloat16(family_models: Path, kernel_cache: Path, name: str) -> None:
    """Which experts' products have which rows beside them differs in all of these."""

    def sequences() -> list[Sequence]:
        prompts = [prompt(number) for number in VARIANTS[name].prompts]
        return [Sequence(ids, SAMPLING, seed=number, ends=(EOS_ID,)) for number, ids in enumerate(prompts)]

    settings = Settings(str(family_models / name), dtype="bfloat16", cache_dir=kernel_cache)
    run = driver(*load(settings))
    alone = answers([run.run_alone(sequence) for sequence in sequences()])
    together, chunks, pairs = sequences(), sequences(), sequences()
    preempted = [replace(sequence, preempt_after=2 + number) for number, sequence in enumerate(sequences())]
    run.run(together)
    run.run(chunks, chunk=7, depth=2)
    run.run(preempted, chunk=64)
    driver(*load(replace(settings, threads=2))).run(pairs, chunk=50)
    for found in (together, chunks, preempted, pairs):
        assert answers(found) == alone
