"""Damaged frames of every kind, from valid ones: the same for the same seed."""

from __future__ import annotations

import json
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from protocol.codec import WireError, decode_from_engine, decode_from_gateway, encode
from protocol.messages import Message
from tests.fuzz.odd import odd_value
from tests.protocol.test_codec import FROM_ENGINE, FROM_GATEWAY

_PREFIX = struct.Struct("<BI")

GATEWAY_FRAMES = tuple(frame for frame, _ in FROM_GATEWAY)
ENGINE_FRAMES = tuple(frame for frame, _ in FROM_ENGINE)

#: By the side that sent the frames they are for.
DECODERS: dict[str, Callable[[bytes], Message | None]] = {
    "gateway": decode_from_gateway,
    "engine": decode_from_engine,
}


def damaged(seed: int, frames: tuple[bytes, ...]) -> Iterator[bytes]:
    """Endless."""
    rng = random.Random(seed)
    while True:
        frame = rng.choice(frames)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            frame = rng.choice(_DAMAGES)(frame, rng)
        yield frame


def _flipped(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randrange(len(frame) + 1)]


def _longer(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(frame) + 1)
    return frame[:at] + rng.randbytes(rng.randint(1, 64)) + frame[at:]


def _spliced(frame: bytes, rng: random.Random) -> bytes:
    other = rng.choice(GATEWAY_FRAMES + ENGINE_FRAMES)
    return frame[: rng.randrange(len(frame) + 1)] + other[rng.randrange(len(other)) :]


def _other_kind(frame: bytes, rng: random.Random) -> bytes:
    return bytes([rng.randrange(20)]) + frame[1:]


def _other_length(frame: bytes, rng: random.Random) -> bytes:
    length = rng.choice((0, 1, len(frame), 2**31, 2**32 - 1, rng.randrange(2**16)))
    return frame[:1] + length.to_bytes(4, "little") + frame[5:]


def _odd_header(frame: bytes, rng: random.Random) -> bytes:
    """A value somewhere in the header is another; columns stay."""
    parts = _parts(frame)
    if parts is None:
        return frame
    header, columns = parts
    at: dict[str, Any] = header
    name = rng.choice([*header, "more"])
    while isinstance(inner := at.get(name), dict) and inner and rng.random() < 0.7:
        at, name = inner, rng.choice([*inner, "more"])
    if rng.random() < 0.2:
        at.pop(name, None)
    else:
        at[name] = odd_value(rng)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return _PREFIX.pack(frame[0], len(text)) + text + columns


def _lying_count(frame: bytes, rng: random.Random) -> bytes:
    parts = _parts(frame)
    if parts is None:
        return frame
    header, columns = parts
    counts = [name for name in header if name.startswith("num_")]
    if not counts:
        return frame
    header[rng.choice(counts)] = rng.choice((0, 1, 2, 255, 2**16, 2**21, 2**24, 2**31, 2**32 - 1, -1))
    text = json.dumps(header).encode()
    return _PREFIX.pack(frame[0], len(text)) + text + columns


def _deep(frame: bytes, rng: random.Random) -> bytes:
    """An object in the header where a value is nested as deep as JSON parsers allow, or deeper."""
    depth = rng.choice((10, 500, 1000, 1024, 5000))
    value = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    parts = _parts(frame)
    if parts is None or not parts[0]:
        return frame
    header, columns = parts
    name = rng.choice(list(header))
    header[name] = "@"
    text = json.dumps(header).encode().replace(b'"@"', value, 1)
    return _PREFIX.pack(frame[0], len(text)) + text + columns


def _noise(frame: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(200))


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flipped,
    _flipped,
    _cut,
    _longer,
    _spliced,
    _other_kind,
    _other_length,
    _odd_header,
    _odd_header,
    _odd_header,
    _odd_header,
    _lying_count,
    _deep,
    _noise,
)


def _parts(frame: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and columns of a frame that still has them."""
    if len(frame) < _PREFIX.size:
        return None
    end = _PREFIX.size + _PREFIX.unpack_from(frame)[1]
    try:
        header = json.loads(frame[_PREFIX.size : end])
    except (ValueError, RecursionError):
        return None
    return (header, frame[end:]) if isinstance(header, dict) else None


def outcome(decode: Callable[[bytes], Message | None], frame: bytes) -> str:
    """What a decoder makes of a frame: "refused", "ignored" or "decoded". Whatever is no WireError comes out.

    What decodes is a message that could have been sent: it can be encoded again.
    """
    try:
        message = decode(frame)
    except WireError:
        return "refused"
    if message is None:
        return "ignored"
    encode(message)
    return "decoded"


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What became of the frames: `outcomes` by decoder, `grown_mib` is how much the peak of memory rose."""

    num_frames: int
    outcomes: dict[str, int]
    grown_mib: float


def fuzz(seed: int, count: int) -> Fuzzed:
    """Give `count` damaged frames to both decoders. Whatever is no WireError comes out."""
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = damaged(seed, GATEWAY_FRAMES + ENGINE_FRAMES)
    for _ in range(count):
        frame = next(stream)
        for name, decode in DECODERS.items():
            outcomes[f"{name}: {outcome(decode, frame)}"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Fuzzed(count, dict(outcomes), grown / 1024)
