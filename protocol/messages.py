"""Every message that crosses the wire between a gateway and an engine.

Owns the types, the protocol number and the bound of each kind. Knows nothing of bytes
(`protocol.codec`) nor of sockets. A kind is added here together with its row in the codec,
its golden bytes in `tests/protocol` and a handler at both ends.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.sampling import SamplingParams

#: (major, minor). Majors must match; minors negotiate down to the lower one.
PROTOCOL = (1, 0)

#: Both sides send a Beat this often, from Hello on.
BEAT_MS = 250

#: A peer silent for this long is taken for dead.
SILENCE_MS = 10_000

#: Characters of a model's public name.
MAX_MODEL_NAME = 512

U32 = "I"  # array typecode of ids and handles, little-endian on the wire
F32 = "f"  # array typecode of logprobs and biases
U16 = "H"  # array typecode of the token counts of a Step's entries


class Kind(enum.IntEnum):
    """First byte of a frame. Numbers 11 and 14 to 17 are reserved by the protocol page."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    SUBMIT = 4
    ABORT = 5
    BEAT = 6
    ADMITTED = 7
    STEP = 8
    PROMPT_LOGPROBS = 9
    FINISHED = 10
    BUNDLE_REQUEST = 12
    BUNDLE_PART = 13


class Role(enum.StrEnum):
    GATEWAY = "gateway"
    OPERATOR = "operator"


class Phase(enum.StrEnum):
    """What an engine is doing; only SERVING admits new work."""

    LOADING = "loading"
    COMPILING = "compiling"
    SERVING = "serving"
    DRAINING = "draining"


class RejectCode(enum.StrEnum):
    HELLO_REQUIRED = "hello_required"
    PROTOCOL = "protocol"
    AUTH = "auth"
    ACCOUNT_LOST = "account_lost"
    ROLE = "role"


class AbortReason(enum.StrEnum):
    CLIENT = "client"
    STOP_STRING = "stop_string"
    DEADLINE = "deadline"
    MOVED = "moved"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(enum.StrEnum):
    """Why a Submit ended in an error. The gateway maps each to a status in `gateway.errors`."""

    OVERLOADED = "overloaded"
    TOO_LONG = "too_long"
    BAD_REQUEST = "bad_request"
    DIGEST_MISMATCH = "digest_mismatch"
    NUMERICS_MISMATCH = "numerics_mismatch"
    DEADLINE = "deadline"
    DRAINING = "draining"
    INTERNAL = "internal"


class Pooling(enum.StrEnum):
    NONE = "none"
    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Hello:
    """Gateway to engine, the first frame of every connection."""

    protocol: tuple[int, int]
    role: Role
    name: str
    build: str
    beat_ms: int = BEAT_MS
    auth: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """What an engine offers, the part of Welcome that exists once it serves.

    `bundle` is the sha256 (hex) of the tokenizer bundle, to be had with BundleRequest.
    `grant_requests` and `grant_tokens` are this gateway's credit.
    """

    model: str
    version: str
    digest: str
    numerics: str
    bundle: str
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, object]
    grant_requests: int
    grant_tokens: int
    max_logprobs: int
    hang_timeout_ms: int
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """Engine to gateway, at Hello (serving absent while loading) and again when serving begins."""

    protocol: tuple[int, int]
    engine_id: str
    epoch: int
    phase: Phase
    serving: Serving | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    code: RejectCode
    text: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A structured-output constraint, compiled by the engine."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Submit:
    """One choice to generate. `prompt_ids` and `generated_ids` are apart so that penalties,
    `min_tokens`, grammars and stop rules of a resumed choice know which is which.

    `sampling` counts `max_tokens` and `min_tokens` from the first token of the choice's whole
    life, `generated_ids` included. `seed` is the choice seed (`protocol.sampling.choice_seed`).
    `prompt_logprobs_from` is the first prompt position whose logprobs are wanted, -1 for none: a
    resumed choice asks for those that had not come. Position 0 has none, since nothing is before it.
    """

    handle: int
    request_id: str
    prompt_ids: array[int]
    sampling: SamplingParams
    seed: int
    generated_ids: array[int] = field(default_factory=lambda: array(U32))
    traceparent: str = ""
    priority: int = 0
    salt: str = ""
    adapter: str | None = None
    grammar: Grammar | None = None
    group: int | None = None
    leader: bool = False
    resume: bool = False
    prompt_logprobs_from: int = -1
    pooling: Pooling = Pooling.NONE
    expect_digest: str = ""
    expect_numerics: str = ""
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    handle: int
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class GatewayBeat:
    seq: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the engine's life began."""

    generated: int = 0
    prompt: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class EngineBeat:
    """Progress, not only life: `step` moves while there is work to do."""

    seq: int
    phase: Phase
    step: int
    step_age_ms: int
    longest_step_ms: int
    running: int
    waiting: int
    free_blocks: int
    grant_requests: int
    grant_tokens: int
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, slots=True)
class Admitted:
    handle: int
    cached_tokens: int
    queue_ms: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprob columns of the tokens of one Step or prompt; k alternatives a token, ties to the lowest id."""

    k: int
    own: array[float]  # f32 [num_tokens]
    rank: array[int]  # u32 [num_tokens], 1 is the most likely
    top_ids: array[int]  # u32 [num_tokens * k]
    top: array[float]  # f32 [num_tokens * k]


@dataclass(frozen=True, slots=True)
class Step:
    """All tokens that one engine step made for one gateway.

    Entry i is the choice `handles[i]`; its `counts[i]` tokens begin at index `firsts[i]` of the
    choice's generated tokens and follow one another in `ids`.
    """

    step: int
    handles: array[int]  # u32 [num_entries]
    firsts: array[int]  # u32 [num_entries]
    counts: array[int]  # u16 [num_entries]
    ids: array[int]  # u32 [num_tokens]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A slice of a prompt's logprobs: row i is that of the prompt token at position `first + i`.

    Slices come in order, and all of them before the first generated token's Step.
    """

    handle: int
    first: int  # at least 1
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Failure:
    code: ErrorCode
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The only terminal frame: exactly one for each Submit. A refused Submit is one with `error`."""

    handle: int
    reason: FinishReason
    num_prompt: int
    num_cached: int
    num_generated: int
    stop_id: int | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class BundleRequest:
    sha256: str


@dataclass(frozen=True, slots=True)
class BundlePart:
    sha256: str
    offset: int
    total: int
    data: bytes


FromGateway = Hello | Submit | Abort | GatewayBeat | BundleRequest
FromEngine = Welcome | Reject | EngineBeat | Admitted | Step | PromptLogprobs | Finished | BundlePart
Message = FromGateway | FromEngine


def u32(values: Sequence[int] = ()) -> array[int]:
    """A column of token ids or handles."""
    return array(U32, values)


def f32(values: Sequence[float] = ()) -> array[float]:
    """A column of logprobs or biases."""
    return array(F32, values)
