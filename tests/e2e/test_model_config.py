"""What a model's own files decide, as clients see it. Cases K of the list of faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.api import Api
from tests.engine.tiny_models import VOCAB_SIZE

PATH = "/v1/completions"

#: The vocabulary of the tokenizer; the embedding matrix has VOCAB_SIZE rows.
NUM_TOKENS = 70


@pytest.fixture
def api(tiny_models: Path, tmp_path: Path, start_pair: Callable) -> Api:
    """A model with two ids that end, sampling defaults, and more rows in its embedding than tokens."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_models / "llama_tied", folder)
    generation = {"eos_token_id": [2, 9], "temperature": 1.0, "top_k": 64, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: number for text, number in vocabulary.items() if number < NUM_TOKENS}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    started: Api = start_pair(folder)[0]
    return started


def test_k4_to_k6_and_k11(api: Api) -> None:
    ids = [3 + place % (NUM_TOKENS - 3) for place in range(20)]
    body = {"prompt": ids, "max_tokens": 30, "return_token_ids": True}

    # K4: each of the ids in the list ends, and is not shown.
    for end in (2, 9):
        choice = api.post(PATH, body | {"logit_bias": {str(end): 100}}).json()["choices"][0]
        assert (choice["finish_reason"], choice["text"], choice["token_ids"]) == ("stop", "", [end])

    # K5: with ignore_eos none of them does.
    forced = api.post(PATH, body | {"logit_bias": {"9": 100}, "ignore_eos": True}).json()["choices"][0]
    assert (forced["finish_reason"], forced["token_ids"]) == ("length", [9] * 30)

    # K6: the model's temperature where the request gives none; the request's own wins.
    free = [api.post(PATH, body | {"min_tokens": 30}).json()["choices"][0]["token_ids"] for _ in range(2)]
    assert free[0] != free[1]
    greedy = [api.post(PATH, body | {"temperature": 0}).json()["choices"][0]["token_ids"] for _ in range(2)]
    assert greedy[0] == greedy[1]

    # K11: ids without a token are sampled, and decode to nothing.
    wild = {"temperature": 2, "top_k": 0, "n": 4, "max_tokens": 500, "ignore_eos": True, "seed": 1}
    answer = api.post(PATH, body | wild)
    assert answer.status_code == 200
    choices = answer.json()["choices"]
    without = sum(token_id >= NUM_TOKENS for choice in choices for token_id in choice["token_ids"])
    assert without > 2000 * (VOCAB_SIZE - NUM_TOKENS) / VOCAB_SIZE / 4
    assert all(0 < len(choice["text"]) < 500 for choice in choices)
