"""The Llama family against transformers: greedy ids in float32, exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protocol.sampling import SamplingParams
from tests.engine.sequences import Sequence
from tests.engine.tiny_models import EOS_ID, NUM_NEW, PROMPT_LENGTHS, VARIANTS, prompt
from tests.engine.torch_runners import Settings, driver, load

#: The first test also makes the models and may build the kernels.
pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)


def greedy(number: int) -> Sequence:
    return Sequence(prompt(number), GREEDY, ends=(EOS_ID,))


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids_equal_transformers(tiny_models: Path, golden, variant: str, kernel_cache: Path) -> None:
    runner, info = load(Settings(str(tiny_models / variant), cache_dir=kernel_cache))
    found = driver(runner, info).run([greedy(number) for number in range(len(PROMPT_LENGTHS))])
    assert found == golden[variant]["ids"]


def test_sharded_weights_are_the_same_model(tiny_models: Path, golden, kernel_cache: Path) -> None:
    runner, info = load(Settings(str(tiny_models / "llama_sharded"), cache_dir=kernel_cache))
    assert driver(runner, info).run([greedy(5), greedy(8)]) == [golden["llama_untied"]["ids"][n] for n in (5, 8)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_transformers(tiny_models: Path, golden, variant: str, kernel_cache: Path) -> None:
    runner, info = load(Settings(str(tiny_models / variant), cache_dir=kernel_cache))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    sequences = [Sequence(prompt(number), sampling) for number in range(4)]
    driver(runner, info).run(sequences)
    for number, sequence in enumerate(sequences):
        expected = np.array(golden[variant]["logprobs"][number])
        (own, rank, top_ids, top) = sequence.logprobs[0]
        assert list(top_ids) == np.argsort(-expected, kind="stable")[:20].tolist()
        np.testing.assert_allclose(top, expected[list(top_ids)], atol=2e-5)
        assert (own, rank, sequence.generated[0]) == (top[0], 1, top_ids[0])
