"""Logprobs in the two shapes of OpenAI's routes, and those of a prompt in vLLM's.

A token's own logprob is given also when it is not among the alternatives. Numbers are finite:
an impossible token has `LOWEST`, since JSON knows no infinity.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence

import orjson

from gateway.stream import Choice, Delta
from gateway.tokenizer import Tokenizer
from protocol.messages import Logprobs

#: What OpenAI gives for tokens that cannot come.
LOWEST = -9999.0


def token_text(raw: bytes) -> str:
    """A token as text; one that is part of a character as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


#: Entries that are written to JSON at a time: as objects they take ten times the memory.
_PIECE = 512


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
        """`offset` is where the answer begins in the choice's text: the prompt's length under echo.

        Those of the prompt are before it: see `of_prompt`.
        """
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes(skip_special_tokens=False)
        self._shown_bytes = tokenizer.token_bytes(skip_special_tokens=skip_special_tokens)
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, delta: Delta) -> dict[str, list[object]]:
        """The logprobs object of a delta that has them."""
        rows = delta.logprobs
        assert rows is not None
        offsets = []
        for token in delta.ids:
            offsets.append(self._offset)
            # A token inside a character begins where that character does.
            self._offset += len(self._utf8.decode(self._shown_bytes[token]))
        return {
            "tokens": [self._text(token) for token in delta.ids],
            "token_logprobs": [max(own, LOWEST) for own in rows.own],
            "top_logprobs": [*self._top(delta.ids, rows, rows.k)],
            "text_offset": [*offsets],
        }

    def of_prompt(self, echo: str, choice: Choice, k: int) -> dict[str, list[object]]:
        """The same of a choice's prompt, whose text is `echo`, with `k` alternatives a token.

        The first token has none: nothing is before it. Joined, the strings of tokens that stand in the
        text are the text; others were added by the tokenizer and take no place.
        """
        rows = choice.prompt_logprobs
        assert rows is not None
        tokens, offsets = self._aligned(echo, choice.prompt_ids)
        return {
            "tokens": [*tokens],
            "token_logprobs": [None, *(max(own, LOWEST) for own in rows.own)],
            "top_logprobs": [None, *self._top(choice.prompt_ids[1:], rows, k)],
            "text_offset": [*offsets],
        }

    def _top(self, ids: array[int], rows: Logprobs, k: int) -> list[dict[str, float]]:
        top = []
        for i, token in enumerate(ids):
            alternatives = range(i * rows.k, i * rows.k + k)
            entries = {self._text(rows.top_ids[at]): max(rows.top[at], LOWEST) for at in alternatives}
            top.append(entries | {self._text(token): max(rows.own[i], LOWEST)})
        return top

    def _aligned(self, text: str, ids: array[int]) -> tuple[list[str], list[int]]:
        """The string and the offset of each token of a text."""
        raw = text.encode()
        tokens, offsets = [], []
        at = num_chars = 0  # bytes, and characters that begin in them
        special_ids, has_begun = self._tokenizer.special_ids, False
        for token in ids:
            piece = self._bytes[token]
            if not has_begun and token not in special_ids:
                has_begun = True
                opening = self._tokenizer.opening_bytes(token)
                piece = opening if raw.startswith(opening, at) else piece
            inside = at < len(raw) and raw[at] & 0xC0 == 0x80
            tokens.append(token_text(piece))
            offsets.append(num_chars - inside)
            if raw.startswith(piece, at):
                at += len(piece)
                num_chars += sum(byte & 0xC0 != 0x80 for byte in piece)
        return tokens, offsets

    def _text(self, token: int) -> str:
        return token_text(self._bytes[token])


class PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each token {id: {logprob, rank, decoded_token}}, null for the first."""

    def __init__(self, tokenizer: Tokenizer, k: int) -> None:
        """The token's own entry comes first, then those of the `k` most likely."""
        self._bytes = tokenizer.token_bytes(skip_special_tokens=False)
        self._k = k

    def of(self, choice: Choice) -> orjson.Fragment:
        """JSON of a choice's prompt."""
        rows = choice.prompt_logprobs
        assert rows is not None
        pieces = [b"null"]
        for start in range(0, len(rows.own), _PIECE):
            entries = [self._entries(choice.prompt_ids[i + 1], rows, i) for i in range(start, len(rows.own))[:_PIECE]]
            pieces.append(orjson.dumps(entries)[1:-1])
        return orjson.Fragment(b"[" + b",".join(pieces) + b"]")

    def _entries(self, token: int, rows: Logprobs, i: int) -> dict[str, dict[str, object]]:
        entries = {str(token): self._entry(token, rows.own[i], rows.rank[i])}
        for j in range(self._k):
            at = i * rows.k + j
            entries.setdefault(str(rows.top_ids[at]), self._entry(rows.top_ids[at], rows.top[at], j + 1))
        return entries

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, object]:
        decoded = self._bytes[token].decode(errors="replace")
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": decoded}


def joined(lists: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """The parallel lists of one text in parts, one after the other."""
    return {name: [entry for part in lists for entry in part[name]] for name in lists[0]}
