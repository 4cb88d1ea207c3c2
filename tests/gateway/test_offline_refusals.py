"""What `LLM` refuses: the text names the argument, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.offline import LLM, EngineError, SamplingParams

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM("fake", backend="fake", cache_dir=tmp_path_factory.mktemp("cache")) as llm:
        yield llm


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: LLM("m", max_model_length=3),
            r"LLM\(\) has no argument 'max_model_length'; did you mean 'max_model_len'\?",
        ),
        (lambda: SamplingParams(temprature=1), "did you mean 'temperature'"),
        (lambda: SamplingParams(xyzzy=1), "it takes n, presence_penalty"),
    ],
)
def test_an_unknown_argument_names_the_nearest(call: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_unknown_arguments_of_methods(llm: LLM) -> None:
    with pytest.raises(TypeError, match="did you mean 'sampling_params'"):
        llm.generate("a", sampling_param=SamplingParams())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"prompts\[1\] must be a string, .* got 3"):
        llm.generate(["a", 3])  # type: ignore[list-item]
    table: dict[str, Any] = {"prompt_token_ids": np.ones((2, 2), np.int64)}
    for prompt in (
        {"prompt": ["a", "b"]},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": 5},
        table,
        {"text": "a"},
        {},
    ):
        with pytest.raises(TypeError, match=r"prompts\[0\] must be a string, "):
            llm.generate(prompt)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"tokenizer": "other"}, "tokenizer='other' cannot be had"),
        ({"trust_remote_code": True}, "is never run"),
    ],
)
def test_an_option_that_cannot_be_had(option: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LLM("m", **option)


def test_values_out_of_range_name_the_prompt_and_the_field(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: temperature must be at least 0 and at most 2, got 9"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(temperature=9)])
    with pytest.raises(ValueError, match=r"prompts\[0\]: n must be between 1 and 128, got 0"):
        llm.generate("a", SamplingParams(n=0))
    with pytest.raises(ValueError, match=r"prompts\[0\].* token ids"):
        llm.generate({"prompt_token_ids": [-1]})
    with pytest.raises(ValueError, match=r"messages\[0\]: messages\[0\]\.role must be one of"):
        llm.chat([{"role": "judge", "content": "a"}])
    assert len(llm.generate("still there", SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("fake", {"backend": "fake", "max_num_seqs": -1}, "--max-num-seqs: .* greater than or equal to 1"),
        ("fake", {"backend": "nonesuch"}, "--backend must be one of"),
        ("fake", {"backend": "fake", "profile_dir": Path("/dev/null/x")}, "--profile-dir /dev/null/x: Not a directory"),
        ("/nowhere", {}, "/nowhere is not a directory"),
        ("no/model", {"tensor_parallel_size": 2}, "--tensor-parallel-size 2: an engine runs a model on one device"),
    ],
)
def test_an_engine_that_cannot_start_says_why(model: str, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"the engine does not start: .*{text}"):
        LLM(model, cache_dir=tmp_path, log_level="error", **options)
