"""The fake backend's tokenizer: token i below 256 is byte i, then a few special tokens and a long word.

A prompt has as many tokens as bytes, and any bytes can be produced. The word is never encoded and
only sampled when asked for: it is a token as long as those of large vocabularies.
"""

from __future__ import annotations

import json

from protocol import bundle

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
SPECIAL_TOKENS = {END_OF_TEXT: "<|endoftext|>", TURN_START: "<|im_start|>", TURN_END: "<|im_end|>"}
LONG_WORD = 259
LONG_WORD_TEXT = " implementation"  # 15 bytes
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 laid it down.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


def vocabulary() -> dict[str, int]:
    characters = byte_characters()
    word = "".join(characters[byte] for byte in LONG_WORD_TEXT.encode())
    # Special tokens that the model's vocabulary lacks would be numbered anew, after its last.
    return {text: token for token, text in (*enumerate(characters), *SPECIAL_TOKENS.items(), (LONG_WORD, word))}


def tokenizer() -> dict[str, object]:
    """Content of tokenizer.json: byte-level BPE without a single merge."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, text in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        # Without merges the ids are the same; but the library keeps each word that it has met (10,000 of up to
        # 256 characters), and a whole prompt as one word takes 3 KiB.
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary(),
            "merges": [],
        },
    }


def packed(context_length: int) -> bytes:
    """The bundle a gateway fetches."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[TURN_END],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "additional_special_tokens": list(SPECIAL_TOKENS.values()),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    return bundle.pack(
        {
            "tokenizer.json": json.dumps(tokenizer()),
            "tokenizer_config.json": json.dumps(settings),
            "chat_template.jinja": CHAT_TEMPLATE,
        }
    )
