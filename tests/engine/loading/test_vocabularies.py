from __future__ import annotations

import base64
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.loading.store import ModelError
from engine.loading.vocabularies import byte_level, qwen_tiktoken, word_piece

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog did not mind.",
    "def tokens(text):\n    return [byte for byte in text.encode()]\n",
    "It's 2024; naïve café, 北京 and emoji 🙂 — they'll all come back.",
] * 3


@pytest.fixture(scope="module")
def trained() -> tuple[Tokenizer, dict[str, int], list[tuple[str, str]]]:
    """A small byte-level BPE of the library's own making: the reference."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer, model["vocab"], [(left, right) for left, right in model["merges"]]


def test_byte_level(trained: tuple[Tokenizer, dict[str, int], list[tuple[str, str]]]) -> None:
    reference, vocab, merges = trained
    text = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    tokenizer = byte_level(json.dumps(vocab), text, qwen=False, add_prefix_space=False)
    for line in LINES:
        ids = tokenizer.encode(line).ids
        assert ids == reference.encode(line).ids
        assert tokenizer.decode(ids) == line


def test_qwen_cuts_numbers_into_digits(trained: tuple[Tokenizer, dict[str, int], list[tuple[str, str]]]) -> None:
    _, vocab, merges = trained
    text = "".join(f"{left} {right}\n" for left, right in merges)
    tokenizer = byte_level(json.dumps(vocab), text, qwen=True, add_prefix_space=False)
    assert tokenizer.pre_tokenizer is not None
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 2024.\n\n ok")]
    assert words == ["It", "'s", "Ġ", "2", "0", "2", "4", ".ĊĊ", "Ġok"]
    assert tokenizer.decode(tokenizer.encode(LINES[2]).ids) == LINES[2]


def test_qwen_tiktoken_has_the_merges_that_made_its_ranks(
    trained: tuple[Tokenizer, dict[str, int], list[tuple[str, str]]],
) -> None:
    reference, vocab, merges = trained
    byte_of = {name: byte for byte, name in enumerate(_names(reference))}
    lines = []
    for token, rank in vocab.items():
        raw = bytes(byte_of[character] for character in token)
        lines.append(f"{base64.b64encode(raw).decode()} {rank}\n")
    tokenizer = qwen_tiktoken("".join(lines))
    model = json.loads(tokenizer.to_str())["model"]
    assert model["vocab"] == vocab
    assert [tuple(pair) for pair in model["merges"]] == merges
    assert tokenizer.token_to_id("<|endoftext|>") == len(vocab)
    assert tokenizer.token_to_id("<|im_end|>") == len(vocab) + 2
    assert tokenizer.token_to_id("<|extra_204|>") == len(vocab) + 207
    for line in LINES:
        assert tokenizer.decode(tokenizer.encode(line).ids) == line


def _names(reference: Tokenizer) -> list[str]:
    """The characters of all bytes, found out by encoding Latin-1's as UTF-8 pairs and ASCII as it is."""
    names: dict[int, str] = {}
    assert reference.pre_tokenizer is not None
    for code in range(0x800):
        raw = chr(code).encode()
        name = "".join(word for word, _ in reference.pre_tokenizer.pre_tokenize_str(chr(code)))
        names |= dict(zip(raw, name, strict=True))
    unseen = sorted(set(range(256)) - set(names))  # no text has these; their characters are those left over
    left = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(names.values()))
    names |= dict(zip(unseen, left, strict=True))
    return [names[byte] for byte in range(256)]


def test_word_piece() -> None:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", "!"]
    tokenizer = word_piece("\n".join(vocab) + "\n", lowercase=True)
    assert tokenizer.encode("Hello WORLD! q").tokens == ["[CLS]", "hello", "wor", "##ld", "!", "[UNK]", "[SEP]"]
    assert tokenizer.decode([2, 5, 6, 7, 8, 3]) == "hello world!"
    assert word_piece("\n".join(vocab), lowercase=False).encode("Hello").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_broken_files() -> None:
    with pytest.raises(ModelError, match=r"vocab\.json and merges\.txt do not make a tokenizer"):
        byte_level('{"a": 0}', "a b\n", qwen=False, add_prefix_space=False)
    with pytest.raises(ModelError, match=r"vocab\.json and merges\.txt do not"):
        byte_level("[", "", qwen=False, add_prefix_space=False)
    with pytest.raises(ModelError, match=r"qwen\.tiktoken has a line"):
        qwen_tiktoken("YQ== one\n")
    with pytest.raises(ModelError, match=r"qwen\.tiktoken must rank its tokens from 0 on"):
        qwen_tiktoken("YQ== 0\n")
    with pytest.raises(ModelError, match=r"must hold \[UNK\]"):
        word_piece("a\nb\n", lowercase=True)
