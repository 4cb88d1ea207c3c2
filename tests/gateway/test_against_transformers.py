"""Prompt ids of chats are those of transformers' `apply_chat_template(tokenize=True)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.schemas import parse_chat
from gateway.texts import ModelText
from tests.gateway import vocabularies

pytestmark = pytest.mark.slow

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "hello <|im_end|> 12345 é🌶"}],
    "system": [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}],
    "turns": [
        {"role": "user", "content": "  hello "},
        {"role": "assistant", "content": "hello\n"},
        {"role": "user", "content": "again"},
    ],
    "final": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the answer is "}],
}
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]
SHOWS_ALL = (
    "{{ bos_token }}{%- for m in messages %}\n  {{- m.role }}: "
    "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=1) }}{% endif %}\n"
    "  {%- if m.content is defined %}{{ m.content | trim }}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def bundle_of(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}


async def compare(files: dict[str, str], messages: list[dict[str, Any]], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = json.loads(files["tokenizer_config.json"])
    special = {name: config[name] for name in ("bos_token", "eos_token") if name in config}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **special)
    ours = ModelText.from_files(files)
    for flags in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        wanted = theirs.apply_chat_template(
            messages, chat_template=config["chat_template"], tokenize=True, return_dict=False, **flags
        )
        request = parse_chat({"messages": json.loads(json.dumps(messages))} | flags, allow_unknown=False)
        rendered = await ours.render(request)
        ids = await ours.tokenizer.encode(rendered, add_special_tokens=False, most=10_000)
        assert ids.tolist() == wanted


@pytest.mark.parametrize("chat", CHATS)
async def test_the_demo_model(demo_model: Path, chat: str, tmp_path: Path) -> None:
    await compare(bundle_of(demo_model), CHATS[chat], tmp_path)


@pytest.mark.parametrize("messages", [*CHATS.values(), TOOLS], ids=[*CHATS, "tools"])
@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.byte_fallback])
async def test_small_vocabularies(make: Any, messages: list[dict[str, Any]], tmp_path: Path) -> None:
    await compare(make(SHOWS_ALL), messages, tmp_path)
