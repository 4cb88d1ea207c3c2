"""Qwen2.5-Coder-0.5B-Instruct: transformers' greedy ids in float32, and the bits of bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from protocol.sampling import SamplingParams
from tests.engine.oracle import greedy_ids
from tests.engine.sequences import Sequence
from tests.engine.torch_runners import Settings, driver, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EOS_IDS = (151645, 151643)
NUM_NEW = 24
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def quicksort(items: list[int]) -> list[int]:\n",
    "# Numbers\n" + "\n".join(f"value_{number} = {number * number}" for number in range(40)) + "\nvalue_40 =",
)


@pytest.fixture(scope="module")
def prompts(qwen_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(qwen_model / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def settings(model: Path, kernel_cache: Path, dtype: str) -> Settings:
    return Settings(*(str(model), dtype, 2048), kv_cache_memory_bytes=512 * 2**20, threads=2, cache_dir=kernel_cache)


def test_float32_equals_transformers(
    qwen_model: Path, prompts: list[list[int]], tmp_path: Path, kernel_cache: Path
) -> None:
    expected = greedy_ids(qwen_model, prompts, NUM_NEW, tmp_path)
    runner, info = load(settings(qwen_model, kernel_cache, "float32"))
    assert (info.context_length, info.eos_ids, info.vocab_size) == (2048, EOS_IDS, 151936)
    sampling = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    driven = driver(runner, info)
    assert [driven.run_alone(Sequence(ids, sampling, ends=EOS_IDS)).generated for ids in prompts] == expected
    assert driven.run([Sequence(ids, sampling, ends=EOS_IDS) for ids in prompts], chunk=64) == expected


def test_bfloat16(qwen_model: Path, prompts: list[list[int]], kernel_cache: Path) -> None:
    runner, info = load(settings(qwen_model, kernel_cache, "auto"))
    driven = driver(runner, info)

    def sequences() -> list[Sequence]:
        sampled = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.95, logprobs=2)
        return [Sequence(ids, sampled, seed=9) for ids in prompts]

    alone = [driven.run_alone(sequence) for sequence in sequences()]
    together = sequences()
    driven.run(together, chunk=7, depth=2)
    assert [(s.generated, s.logprobs) for s in together] == [(s.generated, s.logprobs) for s in alone]
    answer = driven.run_alone(Sequence(prompts[0], SamplingParams(max_tokens=7, temperature=0.0))).generated
    tokenizer = Tokenizer.from_file(str(qwen_model / "tokenizer.json"))
    assert tokenizer.decode(answer) == "The capital of France is Paris."
