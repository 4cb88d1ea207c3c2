"""SmolLM2-135M-Instruct: transformers' greedy ids in float32, and the bits of bfloat16."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from protocol.sampling import SamplingParams
from tests.engine.oracle import greedy_ids
from tests.engine.sequences import Sequence
from tests.engine.torch_runners import Settings, driver, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EOS_ID = 2
NUM_NEW = 40
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "def fibonacci(n):\n" + "    # the sum of the two numbers before, from the third on\n" * 24,
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in PROMPTS]


def settings(demo_model: Path, kernel_cache: Path, dtype: str) -> Settings:
    memory = 512 * 2**20
    return Settings(str(demo_model), dtype=dtype, kv_cache_memory_bytes=memory, threads=2, cache_dir=kernel_cache)


def test_float32_equals_transformers(
    demo_model: Path, prompts: list[list[int]], tmp_path: Path, kernel_cache: Path
) -> None:
    expected = greedy_ids(demo_model, prompts, NUM_NEW, tmp_path)
    runner, info = load(settings(demo_model, kernel_cache, "float32"))
    sampling = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    driven = driver(runner, info)
    assert [driven.run_alone(Sequence(ids, sampling, ends=(EOS_ID,))).generated for ids in prompts] == expected
    assert driven.run([Sequence(ids, sampling, ends=(EOS_ID,)) for ids in prompts], chunk=64) == expected


def test_bfloat16(demo_model: Path, prompts: list[list[int]], tokenizer: Tokenizer, kernel_cache: Path) -> None:
    started = time.monotonic()
    runner, info = load(settings(demo_model, kernel_cache, "auto"))
    load_s = time.monotonic() - started
    assert load_s < 20
    assert (info.context_length, info.eos_ids, info.vocab_size) == (8192, (EOS_ID,), 49152)
    driven = driver(runner, info)

    def sequences() -> list[Sequence]:
        sampled = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.95, logprobs=2)
        greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=2)
        return [Sequence(ids, sampling, seed=9) for sampling in (greedy, sampled) for ids in prompts]

    alone = [driven.run_alone(sequence) for sequence in sequences()]
    assert tokenizer.decode(alone[0].generated).startswith("The capital of France is Paris.")
    together = sequences()
    driven.run(together, chunk=7, depth=2)
    assert [(s.generated, s.logprobs) for s in together] == [(s.generated, s.logprobs) for s in alone]
