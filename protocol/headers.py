"""The header keys of every kind, with their checks: the wire's page as a table.

Names and bounds are normative. A later minor version may add keys with defaults, never change
the meaning of one.
"""

from __future__ import annotations

from protocol import messages as m
from protocol.bundle import MAX_BYTES as MAX_BUNDLE_BYTES
from protocol.checks import (
    U16_MAX,
    U32_MAX,
    U64_MAX,
    Key,
    Unfit,
    flag,
    hex_digest,
    integer,
    mapping,
    member,
    pair,
    read,
    sequence,
    text,
)
from protocol.messages import Kind
from protocol.sampling import COLUMN_FIELDS, FIELD_NAMES, MAX_ALLOWED_IDS, MAX_LOGIT_BIAS, SamplingParams, shown

_u32 = integer(0, U32_MAX)
_u64 = integer(0, U64_MAX)
_i32 = integer(-(2**31), 2**31 - 1)
_i64 = integer(-(2**63), 2**63 - 1)
_protocol = pair(integer(0, U16_MAX))

#: A Submit is at most 64 MiB, so no column of ids is longer than this.
_MAX_IDS = 2**24
_MAX_GRAMMAR = 256 * 2**10

DEFAULT_SAMPLING = SamplingParams()


def _untyped(value: object) -> object:
    """Sampling values: `SamplingParams.validate` owns their types and ranges. Lists, and those in them, are tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)


#: Sampling fields in a Submit's header; those equal to their default are left out.
SAMPLING_KEYS = tuple(
    Key(name, _untyped, getattr(DEFAULT_SAMPLING, name)) for name in FIELD_NAMES if name not in COLUMN_FIELDS
)

_GRAMMAR_KEYS = (Key("kind", text(64)), Key("text", text(_MAX_GRAMMAR)))
_FAILURE_KEYS = (Key("code", member(m.ErrorCode)), Key("text", text(4096)))


def _grammar(value: object) -> m.Grammar:
    return m.Grammar(**read(mapping(value), _GRAMMAR_KEYS))


def _failure(value: object) -> m.Failure:
    return m.Failure(**read(mapping(value), _FAILURE_KEYS))


def _scalar(value: object) -> object:
    if not isinstance(value, bool | int | float | str | None):
        raise Unfit(f"must be a number, a string, true, false or null, got {shown(value)}")
    return text(256)(value) if isinstance(value, str) else value


def _defaults(value: object) -> dict[str, object]:
    """A flat object: what a peer nests deeply would break whoever compares or prints it."""
    entries = mapping(value)
    if len(entries) > 64:
        raise Unfit(f"must have at most 64 entries, got {len(entries)}")
    return {text(64)(name): _scalar(entry) for name, entry in entries.items()}


#: What Welcome holds beside these once the engine serves.
SERVING_KEYS = (
    Key("model", text(m.MAX_MODEL_NAME)),
    Key("version", text(128)),
    Key("digest", text(128)),
    Key("numerics", text(128)),
    Key("bundle", hex_digest),
    Key("vocab_size", integer(1, U32_MAX)),
    Key("context_length", integer(1, U32_MAX)),
    Key("block_size", integer(1, 2**16)),
    Key("num_blocks", integer(1, U32_MAX)),
    Key("max_num_seqs", integer(1, U32_MAX)),
    Key("eos_ids", sequence(_u32, 256)),
    Key("generation_defaults", _defaults),
    Key("grant_requests", _u32),
    Key("grant_tokens", _u64),
    Key("max_logprobs", integer(0, 1024)),
    Key("hang_timeout_ms", integer(1, U32_MAX)),
    Key("features", sequence(text(64), 64), ()),
)

TOTALS_KEYS = tuple(Key(name, _u64, 0) for name in m.Totals.__slots__)

#: An engine's Beat; a gateway's holds `seq` alone.
ENGINE_BEAT_KEYS = (
    Key("phase", member(m.Phase)),
    Key("step", _u64),
    Key("step_age_ms", _u64),
    Key("longest_step_ms", _u64),
    Key("running", _u32),
    Key("waiting", _u32),
    Key("free_blocks", _u32),
    Key("grant_requests", _u32),
    Key("grant_tokens", _u64),
    Key("totals", mapping, {}),
)

HEADERS: dict[Kind, tuple[Key, ...]] = {
    Kind.HELLO: (
        Key("protocol", _protocol),
        Key("role", member(m.Role)),
        Key("name", text(64)),
        Key("build", text(64)),
        Key("auth", text(512), ""),
        Key("beat_ms", integer(1, 60_000), m.BEAT_MS),
    ),
    Kind.WELCOME: (
        Key("protocol", _protocol),
        Key("engine_id", text(128)),
        Key("epoch", _u64),
        Key("phase", member(m.Phase)),
    ),
    Kind.REJECT: (Key("code", member(m.RejectCode)), Key("text", text(2048))),
    Kind.SUBMIT: (
        Key("handle", _u32),
        Key("request_id", text(128)),
        Key("traceparent", text(256), ""),
        Key("num_prompt", integer(0, _MAX_IDS)),
        Key("num_generated", integer(0, _MAX_IDS), 0),
        Key("num_allowed", integer(0, MAX_ALLOWED_IDS), 0),
        Key("num_bias", integer(0, MAX_LOGIT_BIAS), 0),
        Key("sampling", mapping),
        Key("seed", _i64),
        Key("priority", _i32, 0),
        Key("salt", text(1024), ""),
        Key("adapter", text(256), None),
        Key("grammar", _grammar, None),
        Key("group", _u32, None),
        Key("leader", flag, False),
        Key("resume", flag, False),
        Key("prompt_logprobs_from", integer(-1, 2**31 - 1), -1),
        Key("pooling", member(m.Pooling), m.Pooling.NONE),
        Key("expect_digest", text(128), ""),
        Key("expect_numerics", text(128), ""),
        Key("deadline_ms", _u32, 0),
    ),
    Kind.ABORT: (Key("handle", _u32), Key("reason", member(m.AbortReason))),
    Kind.BEAT: (Key("seq", _u64),),
    Kind.ADMITTED: (Key("handle", _u32), Key("cached_tokens", _u32), Key("queue_ms", _u64)),
    Kind.STEP: (
        Key("step", _u64),
        Key("num_entries", integer(0, 2**16)),
        Key("num_tokens", integer(0, 2**21)),
        Key("num_logprobs", integer(0, 1024), 0),
    ),
    Kind.PROMPT_LOGPROBS: (
        Key("handle", _u32),
        Key("first", integer(1, 2**31 - 1)),
        Key("count", integer(1, 2**16)),
        Key("k", integer(1, 1024)),
    ),
    Kind.FINISHED: (
        Key("handle", _u32),
        Key("reason", member(m.FinishReason)),
        Key("stop_id", _u32, None),
        Key("num_prompt", _u32),
        Key("num_cached", _u32),
        Key("num_generated", _u32),
        Key("error", _failure, None),
    ),
    Kind.BUNDLE_REQUEST: (Key("sha256", hex_digest),),
    Kind.BUNDLE_PART: (
        Key("sha256", hex_digest),
        Key("offset", integer(0, MAX_BUNDLE_BYTES)),
        Key("total", integer(0, MAX_BUNDLE_BYTES)),
    ),
}
