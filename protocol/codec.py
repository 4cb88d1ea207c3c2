"""Messages to frames and back: the only place that knows the bytes of the wire.

A message is one frame: `u8 kind · u32 header length · header (orjson object) · columns`.
Integers and columns are little-endian; column lengths follow from header counts, so the whole
size is checked before anything is allocated. Decoding never trusts the peer: every value is
type- and range-checked, and anything else is a `WireError`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from protocol import messages as m
from protocol.checks import U32_MAX, Unfit, mapping, read
from protocol.headers import (
    DEFAULT_SAMPLING,
    ENGINE_BEAT_KEYS,
    HEADERS,
    SAMPLING_KEYS,
    SERVING_KEYS,
    TOTALS_KEYS,
)
from protocol.messages import Kind
from protocol.sampling import COLUMN_FIELDS, FIELD_NAMES, SamplingError, SamplingParams

_PREFIX = struct.Struct("<BI")

_KINDS = {int(kind): kind for kind in Kind}

KIB, MIB = 2**10, 2**20

#: Largest frame of each kind, in bytes.
BOUNDS: dict[Kind, int] = {
    Kind.HELLO: 4 * KIB,
    Kind.WELCOME: 64 * KIB,
    Kind.REJECT: 4 * KIB,
    Kind.SUBMIT: 64 * MIB,
    Kind.ABORT: KIB,
    Kind.BEAT: 4 * KIB,
    Kind.ADMITTED: KIB,
    Kind.STEP: 8 * MIB,
    Kind.PROMPT_LOGPROBS: MIB,
    Kind.FINISHED: 8 * KIB,
    Kind.BUNDLE_REQUEST: KIB,
    Kind.BUNDLE_PART: MIB,
}
MAX_FRAME = max(BOUNDS.values())

#: Bytes of a BundlePart's data: what fits a frame beside its prefix and header.
BUNDLE_PART_BYTES = BOUNDS[Kind.BUNDLE_PART] - KIB


def most_prompt_rows(k: int) -> int:
    """Rows of `k` alternatives that fit one PromptLogprobs frame beside its prefix and header."""
    return (BOUNDS[Kind.PROMPT_LOGPROBS] - KIB) // (8 + 8 * k)


if sys.byteorder != "little":  # pragma: no cover - no such machine is supported
    raise ImportError("columns are little-endian; this machine is not")


class WireError(ValueError):
    """A frame that does not follow the protocol; the text names kind and field.

    `submit_handle` is the handle of a Submit that is wrong elsewhere, so that it can be refused
    with a Finished; None for every other frame.
    """

    def __init__(self, text: str, submit_handle: int | None = None) -> None:
        super().__init__(text)
        self.submit_handle = submit_handle


# --- encoding ------------------------------------------------------------------------------------


def encode(message: m.Message) -> bytes:
    """One frame. Raises WireError when the message is over its kind's bound or has a string
    that is no valid Unicode."""
    kind, header, columns = _ENCODERS[type(message)](message)
    try:
        raw = orjson.dumps(header)
    except TypeError as error:
        raise WireError(f"{kind.name}: {error}") from error
    frame = b"".join((_PREFIX.pack(kind, len(raw)), raw, *columns))
    if len(frame) > BOUNDS[kind]:
        raise WireError(f"{kind.name}: {len(frame)} bytes, at most {BOUNDS[kind]} are allowed")
    return frame


#: Kind, header, columns. orjson writes a dataclass as the object of its fields, nested ones too.
Encoded = tuple[Kind, object, tuple[Any, ...]]


def _encode_hello(x: m.Hello) -> Encoded:
    return Kind.HELLO, x, ()


def _encode_welcome(x: m.Welcome) -> Encoded:
    header: dict[str, object] = {
        "protocol": x.protocol,
        "engine_id": x.engine_id,
        "epoch": x.epoch,
        "phase": x.phase,
    }
    if x.serving is not None:
        header |= {name: getattr(x.serving, name) for name in m.Serving.__slots__}
    return Kind.WELCOME, header, ()


def _encode_reject(x: m.Reject) -> Encoded:
    return Kind.REJECT, x, ()


_SUBMIT_COLUMNS = ("prompt_ids", "generated_ids", "sampling", "adapter", "grammar", "group")
_SUBMIT_PLAIN = tuple(name for name in m.Submit.__slots__ if name not in _SUBMIT_COLUMNS)


def _encode_submit(x: m.Submit) -> Encoded:
    header: dict[str, object] = {name: getattr(x, name) for name in _SUBMIT_PLAIN}
    for name in ("adapter", "group"):
        if (value := getattr(x, name)) is not None:
            header[name] = value
    if x.grammar is not None:
        header["grammar"] = {"kind": x.grammar.kind, "text": x.grammar.text}
    sampling = x.sampling
    header["sampling"] = {
        name: value
        for name in FIELD_NAMES
        if name not in COLUMN_FIELDS and (value := getattr(sampling, name)) != getattr(DEFAULT_SAMPLING, name)
    }
    header |= {
        "num_prompt": len(x.prompt_ids),
        "num_generated": len(x.generated_ids),
        "num_allowed": len(sampling.allowed_token_ids),
        "num_bias": len(sampling.logit_bias),
    }
    columns = (
        x.prompt_ids,
        x.generated_ids,
        m.u32(sampling.allowed_token_ids),
        m.u32([token for token, _ in sampling.logit_bias]),
        m.f32([bias for _, bias in sampling.logit_bias]),
    )
    return Kind.SUBMIT, header, columns


def _encode_abort(x: m.Abort) -> Encoded:
    return Kind.ABORT, x, ()


def _encode_beat(x: m.GatewayBeat | m.EngineBeat) -> Encoded:
    return Kind.BEAT, x, ()


def _encode_admitted(x: m.Admitted) -> Encoded:
    return Kind.ADMITTED, x, ()


def _encode_step(x: m.Step) -> Encoded:
    logprobs = x.logprobs
    header: dict[str, object] = {
        "step": x.step,
        "num_entries": len(x.handles),
        "num_tokens": len(x.ids),
        "num_logprobs": 0 if logprobs is None else logprobs.k,
    }
    columns: tuple[Any, ...] = (x.handles, x.firsts, x.counts, x.ids)
    if logprobs is not None:
        if logprobs.k < 1:
            raise WireError("STEP: logprobs carry at least one alternative a token (k >= 1)")
        columns += (logprobs.own, logprobs.rank, logprobs.top_ids, logprobs.top)
    return Kind.STEP, header, columns


def _encode_prompt_logprobs(x: m.PromptLogprobs) -> Encoded:
    rows = x.logprobs
    header: dict[str, object] = {"handle": x.handle, "first": x.first, "count": len(rows.own), "k": rows.k}
    return Kind.PROMPT_LOGPROBS, header, (rows.own, rows.rank, rows.top_ids, rows.top)


def _encode_finished(x: m.Finished) -> Encoded:
    header = {name: value for name in m.Finished.__slots__ if (value := getattr(x, name)) is not None}
    return Kind.FINISHED, header, ()


def _encode_bundle_request(x: m.BundleRequest) -> Encoded:
    return Kind.BUNDLE_REQUEST, x, ()


def _encode_bundle_part(x: m.BundlePart) -> Encoded:
    return Kind.BUNDLE_PART, {"sha256": x.sha256, "offset": x.offset, "total": x.total}, (x.data,)


_ENCODERS: dict[type, Callable[[Any], Encoded]] = {
    m.Hello: _encode_hello,
    m.Welcome: _encode_welcome,
    m.Reject: _encode_reject,
    m.Submit: _encode_submit,
    m.Abort: _encode_abort,
    m.GatewayBeat: _encode_beat,
    m.EngineBeat: _encode_beat,
    m.Admitted: _encode_admitted,
    m.Step: _encode_step,
    m.PromptLogprobs: _encode_prompt_logprobs,
    m.Finished: _encode_finished,
    m.BundleRequest: _encode_bundle_request,
    m.BundlePart: _encode_bundle_part,
}


# --- decoding ------------------------------------------------------------------------------------


def decode_from_gateway(frame: bytes | memoryview) -> m.FromGateway | None:
    """The message of a frame that a gateway sent; None for a kind that this build does not know.

    Raises WireError for a kind that only engines send, and for everything malformed.
    """
    message: m.FromGateway | None = _decode(frame, _FROM_GATEWAY)
    return message


def decode_from_engine(frame: bytes | memoryview) -> m.FromEngine | None:
    """The message of a frame that an engine sent; see `decode_from_gateway`."""
    message: m.FromEngine | None = _decode(frame, _FROM_ENGINE)
    return message


def _decode(frame: bytes | memoryview, decoders: dict[Kind, Callable[..., Any]]) -> Any:
    view = memoryview(frame)
    if len(view) < _PREFIX.size:
        raise WireError(f"a frame of {len(view)} bytes; the prefix alone takes {_PREFIX.size}")
    number, header_bytes = _PREFIX.unpack_from(view)
    kind = _KINDS.get(number)
    if kind is None:
        return None
    decoder = decoders.get(kind)
    if decoder is None:
        raise WireError(f"{kind.name} does not come from this side")
    if len(view) > BOUNDS[kind]:
        raise WireError(f"{kind.name}: {len(view)} bytes, at most {BOUNDS[kind]} are allowed")
    end = _PREFIX.size + header_bytes
    if end > len(view):
        raise WireError(f"{kind.name}: header of {header_bytes} bytes in a frame of {len(view)}")
    header: Values = {}
    try:
        header = mapping(orjson.loads(view[_PREFIX.size : end]))
        return decoder(read(header, HEADERS[kind]), header, view[end:])
    except orjson.JSONDecodeError as error:
        raise WireError(f"{kind.name}: header is not JSON: {error}") from None
    except (Unfit, SamplingError) as error:
        raise WireError(f"{kind.name}: {error}", _submit_handle(kind, header)) from None


def _submit_handle(kind: Kind, header: Values) -> int | None:
    """The handle of a Submit, if that is right."""
    handle = header.get("handle") if kind is Kind.SUBMIT else None
    return handle if type(handle) is int and 0 <= handle <= U32_MAX else None


_ITEM_BYTES = {code: array(code).itemsize for code in (m.U16, m.U32, m.F32)}


def _columns(body: memoryview, shapes: Sequence[tuple[str, int]]) -> list[Any]:
    """Arrays of (typecode, length) that fill `body` to the byte; later minors may append more."""
    sizes = [_ITEM_BYTES[code] * length for code, length in shapes]
    if len(body) < sum(sizes):
        raise Unfit(f"columns take {sum(sizes)} bytes, the frame has {len(body)}")
    arrays, at = [], 0
    for (code, _), size in zip(shapes, sizes, strict=True):
        column = array(code)
        if size:
            column.frombytes(body[at : at + size])
            at += size
        arrays.append(column)
    return arrays


Values = dict[str, Any]


def _decode_hello(v: Values, header: Values, body: memoryview) -> m.Hello:
    return m.Hello(**v)


def _decode_welcome(v: Values, header: Values, body: memoryview) -> m.Welcome:
    serving = m.Serving(**read(header, SERVING_KEYS)) if "model" in header else None
    return m.Welcome(**v, serving=serving)


def _decode_reject(v: Values, header: Values, body: memoryview) -> m.Reject:
    return m.Reject(**v)


def _decode_submit(v: Values, header: Values, body: memoryview) -> m.Submit:
    num_prompt, num_generated = v.pop("num_prompt"), v.pop("num_generated")
    num_allowed, num_bias = v.pop("num_allowed"), v.pop("num_bias")
    prompt, generated, allowed, bias_ids, bias = _columns(
        body,
        (
            (m.U32, num_prompt),
            (m.U32, num_generated),
            (m.U32, num_allowed),
            (m.U32, num_bias),
            (m.F32, num_bias),
        ),
    )
    sampling = SamplingParams(
        **read(v.pop("sampling"), SAMPLING_KEYS),
        allowed_token_ids=tuple(allowed),
        logit_bias=tuple(zip(bias_ids, bias, strict=True)),
    )
    sampling.validate()
    if num_prompt == 0:
        raise Unfit("num_prompt must be at least 1, got 0")
    return m.Submit(**v, sampling=sampling, prompt_ids=prompt, generated_ids=generated)


def _decode_abort(v: Values, header: Values, body: memoryview) -> m.Abort:
    return m.Abort(**v)


def _decode_gateway_beat(v: Values, header: Values, body: memoryview) -> m.GatewayBeat:
    return m.GatewayBeat(**v)


def _decode_engine_beat(v: Values, header: Values, body: memoryview) -> m.EngineBeat:
    rest = read(header, ENGINE_BEAT_KEYS)
    totals = m.Totals(**read(rest.pop("totals"), TOTALS_KEYS))
    return m.EngineBeat(**v, **rest, totals=totals)


def _decode_admitted(v: Values, header: Values, body: memoryview) -> m.Admitted:
    return m.Admitted(**v)


def _logprob_shapes(count: int, k: int) -> list[tuple[str, int]]:
    """Columns of `count` rows of logprobs."""
    return [(m.F32, count), (m.U32, count), (m.U32, count * k), (m.F32, count * k)]


def _decode_step(v: Values, header: Values, body: memoryview) -> m.Step:
    entries, tokens, k = v["num_entries"], v["num_tokens"], v["num_logprobs"]
    shapes = [(m.U32, entries), (m.U32, entries), (m.U16, entries), (m.U32, tokens)]
    if k:
        shapes += _logprob_shapes(tokens, k)
    handles, firsts, counts, ids, *rest = _columns(body, shapes)
    if sum(counts) != tokens:
        raise Unfit(f"counts add up to {sum(counts)}, num_tokens is {tokens}")
    return m.Step(v["step"], handles, firsts, counts, ids, m.Logprobs(k, *rest) if k else None)


def _decode_prompt_logprobs(v: Values, header: Values, body: memoryview) -> m.PromptLogprobs:
    k = v["k"]
    rows = m.Logprobs(k, *_columns(body, _logprob_shapes(v["count"], k)))
    return m.PromptLogprobs(v["handle"], v["first"], rows)


def _decode_finished(v: Values, header: Values, body: memoryview) -> m.Finished:
    return m.Finished(**v)


def _decode_bundle_request(v: Values, header: Values, body: memoryview) -> m.BundleRequest:
    return m.BundleRequest(**v)


def _decode_bundle_part(v: Values, header: Values, body: memoryview) -> m.BundlePart:
    part = m.BundlePart(**v, data=bytes(body))
    if part.offset + len(part.data) > part.total:
        raise Unfit(f"offset {part.offset} + {len(part.data)} bytes is past total {part.total}")
    return part


_FROM_GATEWAY: dict[Kind, Callable[..., Any]] = {
    Kind.HELLO: _decode_hello,
    Kind.SUBMIT: _decode_submit,
    Kind.ABORT: _decode_abort,
    Kind.BEAT: _decode_gateway_beat,
    Kind.BUNDLE_REQUEST: _decode_bundle_request,
}
_FROM_ENGINE: dict[Kind, Callable[..., Any]] = {
    Kind.WELCOME: _decode_welcome,
    Kind.REJECT: _decode_reject,
    Kind.BEAT: _decode_engine_beat,
    Kind.ADMITTED: _decode_admitted,
    Kind.STEP: _decode_step,
    Kind.PROMPT_LOGPROBS: _decode_prompt_logprobs,
    Kind.FINISHED: _decode_finished,
    Kind.BUNDLE_PART: _decode_bundle_part,
}
