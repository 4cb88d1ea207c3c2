"""Served greedy ids are those of transformers in float32, in every composition of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.api import Api
from tests.engine.tiny_models import NUM_NEW, PROMPT_LENGTHS, VARIANTS, prompt
from tests.processes import free_port

Golden = dict[str, dict[str, list[list[int]]]]

#: In blocks of 16 positions and 4 bytes: 3 layers of K and V with 2 heads of 16 (20 with the odd head_dim).
BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * 16


def body(number: int, *, num_new: int = NUM_NEW, **more: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt(number),
        "temperature": 0,
        "max_tokens": num_new,
        "min_tokens": num_new,  # as the oracle: end-of-sequence is masked
        "return_token_ids": True,
        **more,
    }


def ids_of(api: Api, bodies: list[dict[str, object]]) -> list[list[int]]:
    return [list(answer.choices[0].token_ids or ()) for answer in api.answers("/v1/completions", bodies)]


EVERY_PROMPT = range(len(PROMPT_LENGTHS))


@pytest.mark.parametrize("model", VARIANTS)
def test_alone_and_in_a_batch_of_16_and_with_a_prefix_hit(model: str, start_pair: Callable, golden: Golden) -> None:
    api, _ = start_pair(model)
    expected = golden[model]["ids"]
    alone = [ids_of(api, [body(number, cache_salt=f"alone-{number}")])[0] for number in EVERY_PROMPT]
    assert alone == expected
    assert ids_of(api, [body(number) for number in EVERY_PROMPT]) == expected
    again = api.post("/v1/completions", body(8)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == PROMPT_LENGTHS[8] // 16 * 16
    assert again["choices"][0]["token_ids"] == expected[8]


def test_with_prefill_chunks_of_7(start_pair: Callable, golden: Golden) -> None:
    api, _ = start_pair("llama_bias", "--max-num-batched-tokens=7", "--max-num-seqs=7")
    assert ids_of(api, [body(number) for number in EVERY_PROMPT]) == golden["llama_bias"]["ids"]


def test_after_preemption(start_pair: Callable, golden: Golden) -> None:
    # 48 blocks hold 768 positions; the sixteen together want 1,309 and one wants 324 at most.
    port = free_port()
    api, engine = start_pair("llama_untied", f"--kv-cache-memory-bytes={48 * BLOCK_BYTES}", f"--metrics-port={port}")
    # All begin at once with short prompts, and outgrow the pool together.
    long = [body(number, num_new=200) for number in (0, 1, 2, 3, 4, 11, 12, 15)]
    together = ids_of(api, long)
    assert Api(f"http://127.0.0.1:{port}").metric("num_preemptions_total") > 0
    alone = [ids_of(api, [dict(request, cache_salt="alone")])[0] for request in long]
    assert together == alone
    assert [ids[:NUM_NEW] for ids in together] == [
        golden["llama_untied"]["ids"][n] for n in (0, 1, 2, 3, 4, 11, 12, 15)
    ]
    assert engine.popen.poll() is None
