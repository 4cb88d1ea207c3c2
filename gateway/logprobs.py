"""Logprobs in the two shapes of OpenAI's routes.

A token's own logprob is given also when it is not among the alternatives. Numbers are finite:
an impossible token has `LOWEST`, since JSON knows no infinity.
"""

from __future__ import annotations

import codecs

from gateway.stream import Delta
from gateway.tokenizer import Tokenizer

#: What OpenAI gives for tokens that cannot come.
LOWEST = -9999.0


def token_text(raw: bytes) -> str:
    """A token as text; one that is part of a character as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """`logprobs.content` of the chat route: one entry a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes(skip_special_tokens=False)

    def of(self, delta: Delta) -> dict[str, object]:
        """The logprobs object of a delta that has them."""
        rows = delta.logprobs
        assert rows is not None
        content = []
        for i, token in enumerate(delta.ids):
            alternatives = range(i * rows.k, (i + 1) * rows.k)
            content.append(
                {
                    **self._entry(token, rows.own[i]),
                    "top_logprobs": [self._entry(rows.top_ids[at], rows.top[at]) for at in alternatives],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        raw = self._bytes[token]
        return {"token": token_text(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of the completions route, for one choice and its whole life."""

    def __init__(self, tokenizer: Tokenizer, offset: int, *, skip_special_tokens: bool) -> None:
        """`offset` is where the answer begins in the choice's text: the prompt's length under echo."""
        self._bytes = tokenizer.token_bytes(skip_special_tokens=False)
        self._shown_bytes = tokenizer.token_bytes(skip_special_tokens=skip_special_tokens)
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, delta: Delta) -> dict[str, object]:
        """The logprobs object of a delta that has them."""
        rows = delta.logprobs
        assert rows is not None
        top = []
        offsets = []
        for i, token in enumerate(delta.ids):
            alternatives = range(i * rows.k, (i + 1) * rows.k)
            entries = {self._text(rows.top_ids[at]): max(rows.top[at], LOWEST) for at in alternatives}
            top.append(entries | {self._text(token): max(rows.own[i], LOWEST)})
            offsets.append(self._offset)
            # A token inside a character begins where that character does.
            self._offset += len(self._utf8.decode(self._shown_bytes[token]))
        return {
            "tokens": [self._text(token) for token in delta.ids],
            "token_logprobs": [max(own, LOWEST) for own in rows.own],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return token_text(self._bytes[token])
