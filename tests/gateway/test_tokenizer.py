from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.tokenizer import INLINE_BYTES, PromptTooLong, Tokenizer
from protocol.bundle import BundleError
from tests.gateway import vocabularies

ROOT = Path(__file__).parents[2]


def with_config(files: dict[str, str], **changes: object) -> dict[str, str]:
    config = json.loads(files["tokenizer_config.json"]) | changes
    return files | {"tokenizer_config.json": json.dumps(config)}


async def test_special_tokens_are_added_only_when_asked() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback())
    bos = tokenizer.token_id("<s>")
    plain = await tokenizer.encode("hello", add_special_tokens=False, most=4096)
    assert plain.tolist() == [tokenizer.token_id("▁hello")]
    assert (await tokenizer.encode("hello", add_special_tokens=True, most=4096)).tolist() == [bos, *plain]


@pytest.mark.parametrize(
    ("add_bos_token", "begins_with_bos"), [(True, True), (False, False), (None, True)], ids=["yes", "no", "unsaid"]
)
async def test_add_bos_token_wins_over_the_post_processor(add_bos_token: bool | None, begins_with_bos: bool) -> None:
    tokenizer = Tokenizer(with_config(vocabularies.byte_fallback(), add_bos_token=add_bos_token))
    ids = await tokenizer.encode("hello", add_special_tokens=True, most=4096)
    assert (ids[0] == tokenizer.token_id("<s>")) is begins_with_bos
    assert ids.tolist().count(1) == begins_with_bos


async def test_add_bos_token_adds_what_no_post_processor_does() -> None:
    tokenizer = Tokenizer(with_config(vocabularies.byte_level(), add_bos_token=True, bos_token="<turn>"))
    ids = await tokenizer.encode("a", add_special_tokens=True, most=4096)
    assert ids[0] == tokenizer.token_id("<turn>")
    assert len(ids) == 2


def test_special_tokens_by_name_are_texts_or_objects_from_either_file() -> None:
    files = with_config(vocabularies.byte_level(), eos_token={"content": "<end>", "special": True}, pad_token=None)
    files["special_tokens_map.json"] = json.dumps({"bos_token": "<turn>", "eos_token": "<other>"})
    assert Tokenizer(files).special_tokens == {"bos_token": "<turn>", "eos_token": "<end>"}


def test_special_id_knows_special_tokens_only() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level())
    assert tokenizer.special_id("<end>") == tokenizer.token_id("<end>") == 256
    assert tokenizer.token_id("a") is not None
    assert tokenizer.special_id("a") is None
    assert tokenizer.special_id("<nothing>") is None


def test_token_bytes_of_words_bytes_and_nothing() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback())
    table = tokenizer.token_bytes(skip_special_tokens=False)
    texts = ("▁hello", "hell", "<0xE2>", "<s>")
    assert [table[tokenizer.token_id(text) or 0] for text in texts] == [b" hello", b"hell", b"\xe2", b"<s>"]
    assert table[5000] == b""
    assert tokenizer.token_bytes(skip_special_tokens=True)[1] == b""


def test_an_added_token_outside_the_byte_alphabet_is_its_text() -> None:
    files = vocabularies.byte_level()
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 258, "content": "two words", "special": False})
    tokenizer = Tokenizer(files | {"tokenizer.json": json.dumps(content)})
    assert tokenizer.token_bytes(skip_special_tokens=True)[258] == b"two words"


def test_without_a_decoder_tokens_are_words() -> None:
    files = vocabularies.characters()
    files["tokenizer.json"] = json.dumps(json.loads(files["tokenizer.json"]) | {"decoder": None})
    tokenizer = Tokenizer(files)
    assert tokenizer.token_bytes(skip_special_tokens=True)[tokenizer.token_id("x") or 0] == b" x"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "tokenizer_config.json must hold an object"),
    ],
    ids=["none", "damaged", "config-damaged", "config-list"],
)
def test_unfit_files_are_refused_by_name(files: dict[str, str], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        Tokenizer(files)


async def test_a_text_with_more_tokens_than_asked_for_is_counted() -> None:
    tokenizer = Tokenizer(vocabularies.characters())
    assert len(await tokenizer.encode("a" * 10, add_special_tokens=False, most=10)) == 10
    with pytest.raises(PromptTooLong) as caught:
        await tokenizer.encode("a" * 11, add_special_tokens=False, most=10)
    assert (caught.value.num_tokens, caught.value.exact) == (11, True)


async def test_of_a_hopeless_text_only_the_beginning_is_counted() -> None:
    tokenizer = Tokenizer(vocabularies.characters())
    with pytest.raises(PromptTooLong) as caught:
        await tokenizer.encode("a" * 100_000, add_special_tokens=False, most=100)
    assert (caught.value.num_tokens, caught.value.exact) == (736, False)
    fallback = Tokenizer(vocabularies.byte_fallback())
    assert len(await fallback.encode(" hello" * 100, add_special_tokens=False, most=101)) == 101


async def longest_pause(work: Callable[[], object]) -> float:
    """The longest time that the event loop did nothing else while `work` was awaited."""
    worst, last = 0.0, time.perf_counter()
    task = asyncio.ensure_future(work())  # type: ignore[arg-type]
    while not task.done():
        await asyncio.sleep(0.001)
        worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
    await task
    return worst


async def test_long_texts_are_encoded_beside_the_event_loop() -> None:
    tokenizer = Tokenizer(vocabularies.byte_fallback())
    text = "hello " * (20 * INLINE_BYTES // 6)
    started = time.perf_counter()
    pause = await longest_pause(lambda: tokenizer.encode(text, add_special_tokens=False, most=len(text)))
    assert pause < (time.perf_counter() - started) / 2


def test_a_gateway_that_tokenizes_loads_no_torch() -> None:
    program = """
import asyncio, sys
import gateway.app
from gateway.texts import ModelText
from gateway.schemas import parse_chat
from tests.gateway import vocabularies
text = ModelText.from_files(vocabularies.byte_level())
chat = parse_chat({"messages": [{"role": "user", "content": "hi"}]}, allow_unknown=False)
rendered = asyncio.run(text.render(chat))
assert rendered == "user: hi\\nassistant: ", rendered
assert len(asyncio.run(text.tokenizer.encode(rendered, add_special_tokens=False, most=4096))) == len(rendered)
print(*{"torch", "triton", "kernels", "engine"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
