"""Small tokenizers of the kinds there are, as bundle files."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

#: Prints messages as they are, one a line.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_level(template: str = PLAIN_TEMPLATE) -> dict[str, str]:
    """Byte-level BPE without merges, as GPT-2's alphabet: 256 byte tokens, then `<end>` and `<turn>`; no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<turn>", special=True)])
    return _files(tokenizer, {"eos_token": "<end>", "chat_template": template})


def byte_fallback(template: str = PLAIN_TEMPLATE) -> dict[str, str]:
    """As sentencepiece makes them: words with `▁`, other characters as bytes `<0xE2>`; adds the BOS `<s>`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "▁hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return _files(tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})


def characters(template: str = PLAIN_TEMPLATE) -> dict[str, str]:
    """Every printable ASCII character is one token, so that a text has as many tokens as letters; no BOS."""
    pieces = [*map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.Fuse()
    return _files(tokenizer, {"chat_template": template})


def _files(tokenizer: Tokenizer, config: dict[str, object]) -> dict[str, str]:
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(config)}
