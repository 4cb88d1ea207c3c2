"""The calls of `LLM` in the texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.offline import LLM, EngineError, SamplingParams
from tests.engine.tiny_models import character
from tests.seeds.commands import CALLS
from tests.seeds.models import Weights, write_folder
from tests.seeds.serving import SHORT, served

pytestmark = pytest.mark.timeout(300)

DIVIDED, QUANTIZED = CALLS


@pytest.fixture(scope="module")
def llm(machine: Path, kernel_cache: Path) -> Iterator[LLM]:
    """The quantized one, with what else the texts set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(machine)
        with LLM(
            **QUANTIZED,
            max_model_len=32768,
            max_num_seqs=2,
            enable_prefix_caching=True,
            tensor_parallel_size=1,
            gpu_memory_utilization=0.9,
            kv_cache_memory_bytes="64MiB",
            device="cpu",
            threads=1,
            cache_dir=kernel_cache,
        ) as llm:
            yield llm


def test_two_devices_are_refused_with_what_to_do(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine)
    with pytest.raises(EngineError) as caught:
        LLM(**DIVIDED, device="cpu", max_model_len=512, log_level="error")
    assert str(caught.value) == (
        "the engine does not start: meta-llama/Llama-2-7b-chat-hf: --tensor-parallel-size 2: an engine runs a model on "
        "one device so far. Leave it out, or set it to 1."
    )


def test_generate_is_the_model_of_the_dequantized_weights(
    llm: LLM, gptq_weights: Weights, tmp_path: Path, kernel_cache: Path
) -> None:
    """More prompts than max_num_seqs, and vLLM's names for the parts of what is answered."""
    plain = write_folder(tmp_path / "plain", gptq_weights.plain)
    expected, _ = served([str(plain), *SHORT, f"--cache-dir={kernel_cache}"])
    greedy = SamplingParams(temperature=0, max_tokens=8, min_tokens=8, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}, character(5), "abc", "abc"], greedy, use_tqdm=False)
    first = outputs[0].outputs[0]
    assert (outputs[0].prompt_token_ids, outputs[0].finished, outputs[0].prompt_logprobs) == ([5, 6, 7], True, None)
    assert outputs[1].prompt == character(5)
    assert len({output.request_id for output in outputs}) == 4
    assert first.token_ids == expected
    assert first.text == "".join(map(character, expected))
    assert (first.index, first.finish_reason, first.stop_reason) == (0, "length", None)
    assert first.logprobs is not None
    own = [position[token].logprob for position, token in zip(first.logprobs, first.token_ids, strict=True)]
    assert first.cumulative_logprob == pytest.approx(sum(own))
    assert [position[token].decoded_token for position, token in zip(first.logprobs, expected, strict=True)] == [
        *first.text
    ]
    assert outputs[2].outputs == outputs[3].outputs


def test_chat_and_a_cached_system_message(llm: LLM) -> None:
    """The fixed beginning of prompts is computed once: 4 blocks of 16 are found again."""
    system = {"role": "system", "content": "You are a helpful assistant that answers in rhymes, always. " + "x" * 10}
    params = SamplingParams(temperature=0, max_tokens=4)
    one, other = (llm.chat([system, {"role": "user", "content": text}], params)[0] for text in ("one", "other"))
    assert (one.num_cached_tokens, other.num_cached_tokens) == (0, 64)
    assert len(other.outputs[0].token_ids) == 4


def test_an_argument_that_is_none_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="no argument 'tensor_paralel_size'; did you mean 'tensor_parallel_size'"):
        LLM(model="m", tensor_paralel_size=2)  # type: ignore[call-arg]
