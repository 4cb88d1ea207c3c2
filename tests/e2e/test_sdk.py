"""The OpenAI Python SDK on every route, over a real socket, and a gateway that cannot read the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.tiny_models import PROMPT_LENGTHS, prompt
from tests.processes import Engine, Server


@pytest.fixture
def client(
    start_engine: Callable[..., Engine], start_gateway: Callable[..., Server], tiny_models: Path, tmp_path: Path
) -> Iterator[openai.OpenAI]:
    """An SDK client of a gateway that was started after the model's folder was gone."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_models / "llama_tied", folder)
    engine = start_engine(str(folder), "--served-model-name=tiny", "--threads=1")
    engine.wait_for_output("engine_serving")
    shutil.rmtree(folder)
    gateway = start_gateway(engine.address, flags=(f"--cache-dir={tmp_path / 'cache'}",))
    gateway.wait_until_ready()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_every_route(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    _check_chat(client)
    _check_completions(client)
    _check_errors(client)


def _check_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "brief"}]}]
    common = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "temperature": 0.5, "seed": 3}
    whole = client.chat.completions.create(**common, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("bebrief")
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    texts = {0: "", 1: ""}
    usage = None
    with client.chat.completions.create(**common, n=2, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def _check_completions(client: openai.OpenAI) -> None:
    common = {"model": "tiny", "prompt": [prompt(5), prompt(6)], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**common)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == PROMPT_LENGTHS[5] + PROMPT_LENGTHS[6]
    texts = {0: "", 1: ""}
    with client.completions.create(**common, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]


def _check_errors(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="another", messages=ask)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=ask, temperature=9)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 700, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
