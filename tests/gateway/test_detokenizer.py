from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer
from protocol.messages import u32
from tests.gateway import vocabularies

BYTE_LEVEL = Tokenizer(vocabularies.byte_level())
BYTE_FALLBACK = Tokenizer(vocabularies.byte_fallback())
PEPPER = "\U0001f336"

#: Text of every length in UTF-8, without the lone surrogates that have none.
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return list(asyncio.run(tokenizer.encode(text, add_special_tokens=add_special_tokens, most=4096)))


def byte_ids(raw: bytes) -> list[int]:
    """Tokens of BYTE_LEVEL, whose ids stand for one byte each."""
    table = BYTE_LEVEL.token_bytes(skip_special_tokens=False)
    by_byte = {table[token]: token for token in range(256)}
    return [by_byte[bytes([byte])] for byte in raw]


def pieces(
    tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, u32(prompt or []), skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(TEXT)
def test_tokens_one_by_one_give_the_text(text: str) -> None:
    out = pieces(BYTE_LEVEL, encode(BYTE_LEVEL, text))
    assert "".join(out) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in out)


@given(st.binary(max_size=12), st.binary(max_size=3), st.booleans())
def test_the_json_that_is_next_is_that_of_the_text(raw: bytes, prompt: bytes, skip_special_tokens: bool) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, u32(byte_ids(prompt)), skip_special_tokens)
    for token in [*byte_ids(raw), 256, 9999]:
        known = None if detokenizer.next_json is None else detokenizer.next_json[token]
        text = detokenizer.push(token)
        if known is not None:
            assert orjson.loads(known) == text != ""
            assert detokenizer.next_json is not None


def test_it_is_known_of_whole_characters_and_not_of_hidden_tokens() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, u32(), skip_special_tokens=True)
    table = detokenizer.next_json
    assert table is not None
    assert [table[token] for token in [*byte_ids(b'a"\xc3'), 256]] == [b'"a"', b'"\\""', None, None]
    for byte, is_begun in ((0xC3, True), (0xA9, False)):
        detokenizer.push(*byte_ids(bytes([byte])))
        assert (detokenizer.next_json is None) == is_begun


@given(st.text(st.sampled_from("hello wörld é한🌶 "), max_size=20))
def test_byte_fallback_tokens_give_the_text(text: str) -> None:
    # A text's first token carries the space that the vocabulary puts before every word.
    assert "".join(pieces(BYTE_FALLBACK, encode(BYTE_FALLBACK, text))) == (f" {text}" if text else "")


@given(st.binary(max_size=12))
def test_any_bytes_give_what_decoding_them_whole_gives(raw: bytes) -> None:
    assert "".join(pieces(BYTE_LEVEL, byte_ids(raw))) == raw.decode("utf-8", "replace")


def test_a_character_comes_whole_with_its_last_token() -> None:
    assert pieces(BYTE_LEVEL, byte_ids(f"a{PEPPER}b".encode())) == ["a", "", "", "", PEPPER, "b", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_answer_that_ends_inside_a_character_ends_in_one_replacement(num_bytes: int) -> None:
    ids = byte_ids(b"a" + PEPPER.encode()[:num_bytes])
    assert pieces(BYTE_LEVEL, ids) == ["a", *[""] * num_bytes, "\ufffd"]


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_an_answer_completes_the_prompts_cut_character(num_missing: int) -> None:
    raw = f"Hello world {PEPPER}".encode()
    prompt, rest = byte_ids(raw[:-num_missing]), byte_ids(raw[-num_missing:])
    assert "".join(pieces(BYTE_LEVEL, [*rest, *byte_ids(b"!")], prompt=prompt)) == f"{PEPPER}!"


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_an_answer_that_does_not_begins_after_it(num_missing: int) -> None:
    prompt = byte_ids(f"Hello world {PEPPER}".encode()[:-num_missing])
    assert "".join(pieces(BYTE_LEVEL, byte_ids(b"ok"), prompt=prompt)) == "ok"
    assert "".join(pieces(BYTE_LEVEL, [], prompt=prompt)) == ""
    assert "".join(pieces(BYTE_LEVEL, byte_ids("é".encode()), prompt=prompt)) == "é"


def test_a_replacement_character_that_the_model_says_stays() -> None:
    assert pieces(BYTE_LEVEL, byte_ids("\ufffd".encode())) == ["", "", "\ufffd", ""]
    assert "".join(pieces(BYTE_LEVEL, byte_ids(b"\xbf\xbd"), prompt=byte_ids(b"\xef"))) == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    end = BYTE_LEVEL.special_id("<end>")
    assert end is not None
    ids = [*byte_ids(b"a"), end]
    assert pieces(BYTE_LEVEL, ids) == ["a", "", ""]
    assert pieces(BYTE_LEVEL, ids, skip_special_tokens=False) == ["a", "<end>", ""]


def test_k11_an_id_without_a_token_gives_nothing() -> None:
    assert pieces(BYTE_LEVEL, [100_000, *byte_ids(b"a"), 2**32 - 1]) == ["", "a", "", ""]


@pytest.mark.slow
def test_the_demo_models_tokenizer(demo_model: Path) -> None:
    import tokenizers

    names = ("tokenizer.json", "tokenizer_config.json")
    tokenizer = Tokenizer({name: (demo_model / name).read_text() for name in names})
    reference = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    for text in ("Hello 🌶️ 안녕하세요 wörld\n\n  x", "<|im_start|>user\nhi<|im_end|>\n", "1234 + 5678 = \t\u200d"):
        ids = encode(tokenizer, text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        for skip_special_tokens in (True, False):
            shown = "".join(pieces(tokenizer, ids, skip_special_tokens=skip_special_tokens))
            assert shown == reference.decode(ids, skip_special_tokens=skip_special_tokens)
    for token in range(reference.get_vocab_size()):
        shown = "".join(pieces(tokenizer, [token], skip_special_tokens=False))
        assert shown.rstrip("\ufffd") == reference.decode([token], skip_special_tokens=False).rstrip("\ufffd")
