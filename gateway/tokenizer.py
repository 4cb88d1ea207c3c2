"""A model's tokenizer, built from its bundle: text to ids, and each id to its bytes.

The `tokenizers` library itself reads `tokenizer.json`: transformers 5 rebuilds the pre-tokenizer
of tokenizers that name a class, and its ids then differ from the file's for some texts. What a
prompt depends on beside the file is here: the special tokens by name (`special_tokens`, for chat
templates) and an explicit `add_bos_token`.

Text is made from bytes (`token_bytes`): a token of a byte-level or byte-fallback vocabulary may
be a part of a character, so only joined bytes can be decoded.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Mapping

import orjson
import tokenizers
from tokenizers import decoders

from protocol.bundle import BundleError
from protocol.messages import U32, u32

#: Text up to this long is encoded on the event loop (about 5 ms); longer text in a thread.
INLINE_BYTES = 64 * 1024

#: Names by which chat templates know special tokens.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

#: Of a text with more characters than this for each token there may be, the beginning is encoded
#: first. English has 4 to 5 characters a token.
_LONG_CHARS_PER_TOKEN = 8

#: Where a text is cut, its last tokens may be others than in the whole text, and more of them.
_CUT_TOKENS = 64

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"  # stands before a piece, so that decoders which treat a text's first piece apart do not


class PromptTooLong(Exception):
    """A text has more tokens than asked for: `num_tokens`, or at least so many where it is not `exact`."""

    def __init__(self, num_tokens: int, *, exact: bool) -> None:
        super().__init__(f"the text has {'' if exact else 'at least '}{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.exact = exact


class Tokenizer:
    """Encodes prompts; knows the bytes and the kind of every token."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files` are a bundle's, by name. Raises BundleError when they do not make a tokenizer."""
        self.config = _json_object(files, "tokenizer_config.json")
        named = _json_object(files, "special_tokens_map.json") | self.config
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _token_text(named.get(name)))}
        try:
            self._backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        except KeyError:
            raise BundleError("the tokenizer bundle has no tokenizer.json.") from None
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise BundleError(f"tokenizer.json cannot be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._bos_id = self.token_id(self.special_tokens.get("bos_token", ""))
        self._wants_bos = self.config.get("add_bos_token")
        self._bytes = _TokenBytes(self._backend, frozenset())
        self._visible_bytes = _TokenBytes(self._backend, self.special_ids)
        self._texts = _TokenTexts(self._bytes)
        self._visible_texts = _TokenTexts(self._visible_bytes)
        self._json = _TokenJson(self._texts)
        self._visible_json = _TokenJson(self._visible_texts)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly `text`, if there is one."""
        return self._backend.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is exactly `text`, if there is one."""
        token = self.token_id(text)
        return token if token in self.special_ids else None

    def token_bytes(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Bytes of each id as it stands inside a text; empty for ids without a token, and for
        special tokens when those are skipped."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def opening_bytes(self, token: int) -> bytes:
        """Bytes of an id as the first of a text, where sentencepiece's mark of a word is no space."""
        return self._bytes.opening(token)

    def token_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """`token_bytes` as text; None for those that are no whole characters."""
        return self._visible_texts if skip_special_tokens else self._texts

    def token_json(self, *, skip_special_tokens: bool) -> Mapping[int, bytes | None]:
        """`token_texts` as JSON strings; None also for those without text."""
        return self._visible_json if skip_special_tokens else self._json

    async def encode(self, text: str, *, add_special_tokens: bool, most: int) -> array[int]:
        """Prompt ids (u32). A rendered chat is encoded without special tokens: its template wrote them.

        Raises PromptTooLong for more than `most` ids.
        """
        if len(text) <= INLINE_BYTES:
            return self._encode(text, add_special_tokens, most)
        return await asyncio.to_thread(self._encode, text, add_special_tokens, most)

    def _encode(self, text: str, add_special_tokens: bool, most: int) -> array[int]:
        # `encode` holds the GIL throughout, `encode_batch_fast` does not: 580 kB of text stopped the
        # event loop for 470 ms and for 6 ms.
        if len(text) > _LONG_CHARS_PER_TOKEN * most:
            # Two megabytes take seconds and 150 MB; where their beginning is too long already, it is enough.
            (head,) = self._backend.encode_batch_fast([text[: _LONG_CHARS_PER_TOKEN * most]], add_special_tokens=False)
            if len(head) > most + _CUT_TOKENS:
                raise PromptTooLong(len(head) - _CUT_TOKENS, exact=False)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > most:  # asked before the ids, whose list holds the GIL for 40 ms a million
            raise PromptTooLong(len(encoding), exact=True)
        ids = array(U32, encoding.ids)
        if add_special_tokens and self._bos_id is not None and isinstance(self._wants_bos, bool):
            has_bos = bool(ids) and ids[0] == self._bos_id
            if self._wants_bos and not has_bos:
                return u32([self._bos_id]) + ids
            if has_bos and not self._wants_bos:
                return ids[1:]
        return ids


class _TokenBytes(dict[int, bytes]):
    """Filled as ids are seen: most of a vocabulary never is."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        # The library has no kinder way to ask how a decoder is made than its own JSON.
        decoder = orjson.loads(backend.to_str()).get("decoder") if backend.decoder is not None else None
        kinds = {part["type"] for part in (decoder or {}).get("decoders", [decoder] if decoder else [])}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._decoder: decoders.Decoder | None = backend.decoder

    def __missing__(self, token: int) -> bytes:
        piece = None if token in self._hidden else self._backend.id_to_token(token)
        value = b"" if piece is None else self._piece_bytes(piece)
        self[token] = value
        return value

    def opening(self, token: int) -> bytes:
        """Bytes of an id that begins a text."""
        piece = self._backend.id_to_token(token)
        if piece is None or self._byte_level or (self._byte_fallback and _BYTE_TOKEN.fullmatch(piece)):
            return self[token]
        return piece.encode() if self._decoder is None else self._decoder.decode([piece]).encode()

    def _piece_bytes(self, piece: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
            except KeyError:
                return piece.encode()  # an added token that is not written in the byte alphabet
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if self._decoder is None:
            return f" {piece}".encode()  # without a decoder, tokens are words
        return self._decoder.decode([_ANCHOR, piece]).removeprefix(_ANCHOR).encode()


class _TokenTexts(dict[int, str | None]):
    """Filled as ids are seen, like the bytes it is made from."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._bytes[token].decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class _TokenJson(dict[int, bytes | None]):
    """Filled as ids are seen, like the texts it is made from."""

    def __init__(self, token_texts: Mapping[int, str | None]) -> None:
        super().__init__()
        self._texts = token_texts

    def __missing__(self, token: int) -> bytes | None:
        value = orjson.dumps(text) if (text := self._texts[token]) else None
        self[token] = value
        return value


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2): printable Latin-1
    stands for itself, every other byte for the next character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _json_object(files: Mapping[str, str], name: str) -> dict[str, object]:
    if name not in files:
        return {}
    try:
        value = orjson.loads(files[name])
    except orjson.JSONDecodeError as error:
        raise BundleError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{name} must hold an object.")
    return value


def _token_text(entry: object) -> str:
    """The text of a special token, written as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
