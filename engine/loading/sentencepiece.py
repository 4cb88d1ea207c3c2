"""tokenizer.model (SentencePiece) as a `tokenizers` tokenizer.

The file is a protocol buffer of which a few fields matter, so it is read here, without that package.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.loading.store import ModelError

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2


class PieceType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One token; its id is its place in the file."""

    text: str
    score: float
    type: PieceType


@dataclass(slots=True)
class SentencePieceModel:
    """What is read of a file. The defaults are those of the format."""

    pieces: list[Piece] = field(default_factory=list)
    kind: int = _UNIGRAM
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        """Raises ModelError when `data` is no such file."""
        model = cls()
        try:
            for number, value in _fields(data):
                if number == 1:
                    model.pieces.append(_piece(value))
                elif number == 2:
                    model.kind = int(dict(_fields(value)).get(3, _UNIGRAM))
                elif number == 3:
                    model._read_normalizer(dict(_fields(value)))
        except (ValueError, TypeError, IndexError, struct.error) as error:
            raise ModelError(
                f"tokenizer.model is not a SentencePiece model, or was not copied whole: {error}."
            ) from error
        if not model.pieces or model.kind not in (_UNIGRAM, _BPE):
            raise ModelError("tokenizer.model must be a SentencePiece model of the kind BPE or unigram.")
        return model

    def _read_normalizer(self, values: Mapping[int, object]) -> None:
        charsmap = values.get(2, b"")
        if not isinstance(charsmap, bytes):
            raise ValueError("the normalizer's map is not bytes")
        self.charsmap = charsmap
        self.add_dummy_prefix = bool(values.get(3, True))
        self.remove_extra_whitespaces = bool(values.get(4, True))

    def tokenizer(self, *, prefix_every_part: bool) -> Tokenizer:
        """`prefix_every_part`: the space that stands before a text stands after each special token in it as well,
        as in transformers' "legacy" tokenizers.
        """
        tokenizer = Tokenizer(self._bpe() if self.kind == _BPE else self._unigram())
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.remove_extra_whitespaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        by_pieces = self.kind == _UNIGRAM or not prefix_every_part
        if by_pieces:
            scheme = "never" if not self.add_dummy_prefix else "always" if prefix_every_part else "first"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=self.kind == _UNIGRAM)
        else:
            steps += [normalizers.Prepend(_SPACE)] * self.add_dummy_prefix + [normalizers.Replace(" ", _SPACE)]
        if steps:
            tokenizer.normalizer = normalizers.Sequence(steps)
        strip = [decoders.Strip(" ", 1, 0)] * self.add_dummy_prefix
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        for piece in self.pieces:
            if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED):
                special = piece.type is not PieceType.USER_DEFINED
                tokenizer.add_tokens([AddedToken(piece.text, special=special, normalized=False)])
        return tokenizer

    def _bpe(self) -> models.BPE:
        """Merges are the pairs that make a piece; those of a better piece come first."""
        vocab = {piece.text: number for number, piece in enumerate(self.pieces)}
        made = [piece for piece in self.pieces if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED)]
        merges: list[tuple[str, str]] = []
        for piece in sorted(made, key=lambda piece: -piece.score):
            text = piece.text
            pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
            merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        return models.BPE(vocab, merges, unk_token=self._unknown(), fuse_unk=True, byte_fallback=self._has_bytes())

    def _unigram(self) -> models.Unigram:
        unknown = next((n for n, piece in enumerate(self.pieces) if piece.type is PieceType.UNKNOWN), None)
        return models.Unigram([(piece.text, piece.score) for piece in self.pieces], unknown, self._has_bytes())

    def _unknown(self) -> str | None:
        return next((piece.text for piece in self.pieces if piece.type is PieceType.UNKNOWN), None)

    def _has_bytes(self) -> bool:
        return any(piece.type is PieceType.BYTE for piece in self.pieces)


def _piece(data: object) -> Piece:
    values = dict(_fields(data))
    text, score = values.get(1, b""), values.get(2, b"\0\0\0\0")
    kind = values.get(3, PieceType.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of another kind")
    return Piece(text.decode(), struct.unpack("<f", score)[0], PieceType(kind))


def _fields(data: object) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message: an integer, or the bytes of a float, a string or an inner message."""
    if not isinstance(data, bytes):
        raise ValueError("a message is not bytes")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"field {number} does not end")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where the next thing begins)."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
