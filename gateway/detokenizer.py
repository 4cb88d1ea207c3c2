"""Token ids of one choice to text, token by token, never half a character."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping

from gateway.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

#: A character has at most 4 bytes and a token at least one, so a cut character began in these.
_CUT_TOKENS = 4

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of an answer is the UTF-8 of its tokens' bytes, each piece up to the last whole character.

    A prompt given as ids may end inside a character. Its bytes count as begun: an answer that
    completes the character gets it whole, and one that does not begins after it. Bytes that are
    no UTF-8 become U+FFFD; an answer that ends inside a character ends in one U+FFFD.
    """

    __slots__ = ("_bytes", "_from_prompt", "_in_character", "_json", "_texts", "_utf8")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: array[int], skip_special_tokens: bool) -> None:
        self._bytes = tokenizer.token_bytes(skip_special_tokens=skip_special_tokens)
        self._texts = tokenizer.token_texts(skip_special_tokens=skip_special_tokens)
        self._json = tokenizer.token_json(skip_special_tokens=skip_special_tokens)
        self._utf8 = _utf8_decoder("replace")
        self._utf8.decode(b"".join(self._bytes[token] for token in prompt_ids[-_CUT_TOKENS:]))
        #: The cut character at the prompt's end has got no byte from the answer yet.
        self._from_prompt = self._in_character = self._utf8.getstate()[0] != b""

    @property
    def next_json(self) -> Mapping[int, bytes | None] | None:
        return None if self._in_character else self._json

    def push(self, token_id: int) -> str:
        """The text that became whole with this token, often its own."""
        if not self._in_character and (whole := self._texts[token_id]) is not None:
            return whole
        piece = self._bytes[token_id]
        text = self._utf8.decode(piece)
        self._in_character = self._utf8.getstate()[0] != b""
        if self._from_prompt and piece:
            self._from_prompt = False
            # Not continued: the replacement stands for the prompt's bytes alone.
            if text.startswith(_REPLACEMENT) and piece[0] & 0xC0 != 0x80:
                return text[1:]
        return text

    def finish(self) -> str:
        """What remains: U+FFFD when the answer ends inside a character, else nothing."""
        return "" if self._from_prompt else self._utf8.decode(b"", final=True)
