"""`LLM` and a server give the same answers to the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gateway.offline import LLM, SamplingParams
from tests.processes import Engine, Server

pytestmark = pytest.mark.timeout(120)

BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 24},
    {"seed": 5, "n": 2, "max_tokens": 16, "logprobs": 2},
    {"seed": 6, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 0},
    {"seed": 9, "max_tokens": 4, "prompt_logprobs": 2, "bad_words": ["the", "e"]},
    {"seed": 7, "max_tokens": 40, "stop": ["e", "a"], "min_tokens": 3},
    {"temperature": 0, "logit_bias": {5: 3.0, 9: -100}, "allowed_token_ids": list(range(3, 60)), "min_p": 0.1},
)


def compare_with(server: Server, llm: LLM, prompt: str) -> None:
    for body in BODIES:
        sent = body | {"prompt": prompt, "return_token_ids": True, "top_k": body.get("top_k", 0)}
        sent.setdefault("temperature", 1.0)
        if "logit_bias" in body:
            sent["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
        status, answer = server.post("/v1/completions", sent)
        assert status == 200, answer
        (output,) = llm.generate(prompt, SamplingParams(**body))
        choices = json.loads(answer)["choices"]
        for choice, completion in zip(choices, output.outputs, strict=True):
            assert completion.token_ids == choice["token_ids"]
            assert output.prompt_token_ids == choice["prompt_token_ids"]
            assert (completion.text, completion.finish_reason) == (choice["text"], choice["finish_reason"])
            assert completion.stop_reason == choice["stop_reason"]
            if "logprobs" in body:
                assert completion.logprobs is not None
                own = [p[token].logprob for token, p in zip(completion.token_ids, completion.logprobs, strict=True)]
                assert own == choice["logprobs"]["token_logprobs"]
        if "prompt_logprobs" in body:
            assert output.prompt_logprobs is not None
            told = [p and {str(t): asdict(entry) for t, entry in p.items()} for p in output.prompt_logprobs]
            assert told == choices[0]["prompt_logprobs"]
    (chatted,) = llm.chat([{"role": "user", "content": prompt}], SamplingParams(seed=8, max_tokens=12))
    chat = {"messages": [{"role": "user", "content": prompt}], "seed": 8, "max_tokens": 12, "temperature": 1.0}
    status, answer = server.post("/v1/chat/completions", chat | {"top_k": 0, "return_token_ids": True})
    (choice,) = json.loads(answer)["choices"]
    assert chatted.outputs[0].token_ids == choice["token_ids"]
    assert chatted.outputs[0].text == choice["message"]["content"]
    assert chatted.prompt_token_ids == choice["prompt_token_ids"]


@pytest.mark.slow
def test_answers_are_a_servers(
    demo_model: Path, start_engine: Callable[..., Engine], start_gateway: Callable[..., Server]
) -> None:
    engine = start_engine(str(demo_model), "--threads=1")
    server = start_gateway(engine.address)
    server.wait_until_ready(60)
    with LLM(demo_model, threads=1) as llm:
        compare_with(server, llm, "The sky is blue because")


def test_answers_are_a_servers_with_the_fake_backend(
    tmp_path: Path, start_engine: Callable[..., Engine], start_gateway: Callable[..., Server]
) -> None:
    server = start_gateway(start_engine().address)
    server.wait_until_ready()
    with LLM("fake", backend="fake", cache_dir=tmp_path) as llm:
        compare_with(server, llm, "The sky is blue because")
