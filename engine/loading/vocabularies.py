"""Vocabulary files of older tokenizers as `tokenizers` tokenizers: byte-level BPE and WordPiece."""

from __future__ import annotations

import base64
import binascii
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.loading.store import ModelError

#: How Qwen, from the first to the third, cuts text before it merges.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Those of Qwen's first generation, after the vocabulary.
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))


def byte_level(vocab: str, merges: str, *, qwen: bool, add_prefix_space: bool) -> Tokenizer:
    """From the texts of vocab.json and merges.txt. `qwen` is how text is cut; else it is as in GPT-2.

    Raises ModelError.
    """
    try:
        table = {str(token): int(number) for token, number in json.loads(vocab).items()}
        lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
        pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
        model = models.BPE(table, pairs)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ModelError(f"vocab.json and merges.txt do not make a tokenizer: {error}.") from error
    if qwen:
        return _qwen(model)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def qwen_tiktoken(text: str) -> Tokenizer:
    """From qwen.tiktoken: a line for each token, its bytes in base64 and its rank. Raises ModelError."""
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in text.splitlines())}
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"qwen.tiktoken has a line that is not a token and its rank: {error}.") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelError("qwen.tiktoken must rank its tokens from 0 on, every byte among them.")
    names = _byte_names()
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            left, right = _last_merge(token, ranks)
            merges.append((_named(left, names), _named(right, names)))
    # tiktoken looks a whole piece up before it merges.
    model = models.BPE({_named(token, names): rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    tokenizer = _qwen(model)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _QWEN_SPECIAL])
    return tokenizer


def word_piece(vocab: str, *, lowercase: bool) -> Tokenizer:
    """From the text of vocab.txt, a token a line, as BERT has it. Raises ModelError."""
    table = {line: number for number, line in enumerate(vocab.splitlines())}
    if "[UNK]" not in table:
        raise ModelError("vocab.txt must hold [UNK]; only BERT's kind of vocabulary is read from it.")
    tokenizer = Tokenizer(models.WordPiece(table, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = [text for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if text in table]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if "[CLS]" in table and "[SEP]" in table:
        ends = [("[CLS]", table["[CLS]"]), ("[SEP]", table["[SEP]"])]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    return tokenizer


def _qwen(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that `token` is made of when all pairs of a better rank are merged."""
    parts = [token[place : place + 1] for place in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        ranked = [(ranks.get(parts[place] + parts[place + 1], limit), place) for place in range(len(parts) - 1)]
        rank, place = min(ranked)
        if rank >= limit:
            raise ModelError(f"qwen.tiktoken: the token of rank {limit} is not made of two of better ranks.")
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def _byte_names() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(seen)]
    names = {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def _named(token: bytes, names: list[str]) -> str:
    return "".join(names[byte] for byte in token)
