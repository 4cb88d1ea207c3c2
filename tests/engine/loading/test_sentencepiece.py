from __future__ import annotations

import itertools
import struct

import pytest

from engine.loading.sentencepiece import PieceType, SentencePieceModel
from engine.loading.store import ModelError

SPACE = "▁"
WORDS = ["he", "ll", "hell", "hello", f"{SPACE}w", "or", "wor", f"{SPACE}wor", "ld", f"{SPACE}h", "lo", "el"]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def piece(text: str, score: float, kind: PieceType) -> bytes:
    body = message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
    return message(1, body + (integer(3, kind) if kind is not PieceType.NORMAL else b""))


def pieces() -> list[tuple[str, float, PieceType]]:
    """As Llama's: specials, bytes, merged pieces by rank, single characters last."""
    found = [("<unk>", 0.0, PieceType.UNKNOWN), ("<s>", 0.0, PieceType.CONTROL), ("</s>", 0.0, PieceType.CONTROL)]
    found += [(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    single = dict.fromkeys("".join(WORDS))
    found += [(text, -float(rank), PieceType.NORMAL) for rank, text in enumerate([*WORDS, *single])]
    return found


def model_file(kind: int = 2, *, dummy_prefix: bool = True) -> bytes:
    normalizer = message(1, b"identity") + integer(3, dummy_prefix) + integer(4, 0)
    parts = b"".join(piece(*each) for each in pieces())
    return parts + message(2, integer(3, kind) + integer(35, 1)) + message(3, normalizer)


def reference_ids(text: str) -> list[int]:
    """SentencePiece's BPE: the neighbours whose piece has the best score are joined, the first of equals first."""
    table = {text: (number, score) for number, (text, score, kind) in enumerate(pieces()) if kind is PieceType.NORMAL}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(-table[a + b][1], n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in table]
        if not pairs:
            break
        n = min(pairs)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [table[part][0]] if part in table else [3 + byte for byte in part.encode()]
    return ids


@pytest.mark.parametrize("prefix_every_part", [True, False])
def test_bpe(prefix_every_part: bool) -> None:
    tokenizer = SentencePieceModel.parse(model_file()).tokenizer(prefix_every_part=prefix_every_part)
    for text in ("hello world", "hell or hello", "world  world", "é hello\n", "wow", "lloelhe"):
        ids = tokenizer.encode(text).ids
        assert ids == reference_ids(text), text
        assert tokenizer.decode(ids) == text


def test_where_a_space_is_added_after_a_special_token() -> None:
    parsed = SentencePieceModel.parse(model_file())
    first, every = (parsed.tokenizer(prefix_every_part=every).encode("hello<s>hello").tokens for every in (False, True))
    assert first == [SPACE, "hello", "<s>", "hello"]
    assert every == [SPACE, "hello", "<s>", SPACE, "hello"]


def test_without_a_space_before_a_text() -> None:
    tokenizer = SentencePieceModel.parse(model_file(dummy_prefix=False)).tokenizer(prefix_every_part=False)
    assert tokenizer.encode("hello").tokens == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_unigram_takes_the_best_sum_of_scores() -> None:
    tokenizer = SentencePieceModel.parse(model_file(kind=1)).tokenizer(prefix_every_part=True)
    # "▁h" (-9) "el" (-11) "lo" (-10), or "▁" (-12) "hello" (-3): the latter.
    assert tokenizer.encode("hello").tokens == [SPACE, "hello"]
    assert tokenizer.decode(tokenizer.encode("hello world").ids) == "hello world"


def test_special_pieces_are_special() -> None:
    tokenizer = SentencePieceModel.parse(model_file()).tokenizer(prefix_every_part=False)
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == {0: "<unk>", 1: "<s>", 2: "</s>"}


@pytest.mark.parametrize("data", [b"", b"hello world", b"\xff" * 40, model_file()[:-3], model_file(kind=3)])
def test_what_is_no_model(data: bytes) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer\.model (is not a SentencePiece model|must be a SentencePiece model)"
    ):
        SentencePieceModel.parse(data)
