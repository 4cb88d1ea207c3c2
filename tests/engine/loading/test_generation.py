from __future__ import annotations

from pathlib import Path

import pytest

from engine.loading.generation import eos_ids, generation_defaults, read_generation_config
from engine.loading.store import ModelError, ModelFolder


def test_absent_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_generation_config(ModelFolder(tmp_path)) == {}


def test_defaults_hold_whatever_do_sample_says() -> None:
    generation: dict[str, object] = {
        "do_sample": False,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
        "min_p": None,
        "max_new_tokens": 5,
    }
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    assert generation_defaults(generation) == expected


@pytest.mark.parametrize("generation", [{"temperature": "hot"}, {"top_p": 0.0}, {"top_k": 1.5}])
def test_bad_default_is_named(generation: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {next(iter(generation))} must be"):
        generation_defaults(generation)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 9, 2]}, {"eos_token_id": 1}, (2, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": [1]}, (1,)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
)
def test_eos_ids(generation: dict[str, object], config: dict[str, object], expected: tuple[int, ...]) -> None:
    assert eos_ids(generation, config, 10) == expected


def test_ends_of_the_chat_of_qwen() -> None:
    """<|endoftext|>, and what its chat program stops at: <|im_start|> and <|im_end|>."""
    chat: dict[str, object] = {"chat_format": "chatml", "eos_token_id": 151643}
    assert eos_ids(chat, {}, 151936) == (151643, 151644, 151645)
    assert eos_ids(chat | {"chat_format": "raw"}, {}, 151936) == (151643,)
    assert eos_ids(chat, {}, 151645) == (151643, 151644)


@pytest.mark.parametrize("value", ["</s>", [2, None], 10, -1, True])
def test_eos_that_is_no_token_id(value: object) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id .* is not a token id below 10"):
        eos_ids({"eos_token_id": value}, {}, 10)
