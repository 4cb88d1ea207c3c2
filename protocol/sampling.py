"""Sampling: the only definition of its fields, defaults, ranges, error texts and rules.

Order of operations on one row of logits, each step on the result of the one before:

1. `logit_bias` is added; ids outside `allowed_token_ids` (when given) are masked, and so is the
   last id of each of `bad_words` whose other ids are the last ones generated.
2. Penalties: repetition over prompt and generated ids (a positive logit is divided, a negative
   one multiplied), then frequency (times count) and presence (once), over generated ids only.
3. While fewer than `min_tokens` are generated: end-of-sequence and stop ids are masked.
4. The grammar's mask.
5. `temperature` divides. Below `GREEDY_BELOW` the choice is the argmax here and the rest is skipped.
6. `top_k`, then `top_p` (the smallest set of most likely tokens whose probability reaches it, the
   one that crosses included), then `min_p` (relative to the most likely token).
7. Gumbel noise (below) is added and the largest wins.

Ties, everywhere, go to the lowest token id. Logprobs are the log-softmax of the logits before
all of it. Noise is a pure function of (choice seed, position, token id), so there is no
generator state anywhere: a choice can move to another engine in mid-sequence.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

#: A temperature under this is greedy; nothing is divided by it.
GREEDY_BELOW = 1e-5

#: Bounds that hold on the wire whatever the model.
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 2**20
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 512
MAX_BAD_WORD_IDS = 64

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15

#: Largest float32 under 1. The uniform number is clamped to it: the largest of the 2^24 values
#: rounds to 1.0 in float32, whose Gumbel would be +inf, so that every 2^24th draw (one in some
#: 340 tokens of a 49k vocabulary) would force an arbitrary token.
LARGEST_UNIFORM = 1.0 - 2.0**-24


class SamplingError(ValueError):
    """A field is out of range. `field` names it; the text has the limit and the value given."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice is sampled. All values are checked by `validate`.

    `top_k` 0 and -1 mean no limit. `logprobs` None means off, 0 the chosen token's only, k the
    k most likely as well; `prompt_logprobs` is the same for the tokens of the prompt. `stop_token_ids`
    end the choice and, like the model's end-of-sequence ids (unless `ignore_eos`), are not part of
    the text. `bad_words` are sequences of ids none of which is ever completed.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `SamplingError` for the first field that is of a wrong type or out of range.

        With `vocab_size`, every token id must be below it.
        """
        # Each request waits for this two or three times: what is plainly right takes no call.
        for name, low, high, exclusive in _FLOAT_RANGES:
            value = getattr(self, name)
            if not (type(value) is float and low < value <= high):
                _check_float(name, value, low, high, low_exclusive=exclusive)
        for name, low_int, high_int in _INT_RANGES:
            value = getattr(self, name)
            if not (type(value) is int and low_int <= value <= high_int):
                _check_int(name, value, low_int, high_int)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError("ignore_eos", f"ignore_eos must be true or false, got {self.ignore_eos!r}.")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise SamplingError(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.",
            )
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100.0, 100.0)
        self.validate_ids(vocab_size)

    def validate_ids(self, vocab_size: int | None) -> None:
        """The part of `validate` that depends on the vocabulary."""
        if self.stop_token_ids != ():
            _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS, vocab_size)
        if self.allowed_token_ids != ():
            _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS, vocab_size)
        if self.logit_bias != ():
            _check_ids("logit_bias", tuple([token for token, _ in self.logit_bias]), MAX_LOGIT_BIAS, vocab_size)
        if self.bad_words != ():
            _check_bad_words(self.bad_words, vocab_size)


#: (name, lowest, highest, whether the lowest itself is excluded)
_FLOAT_RANGES = (
    ("temperature", 0.0, 2.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, 100.0, True),
)
_INT_RANGES = (
    ("max_tokens", 0, MAX_TOKENS_LIMIT),
    ("min_tokens", 0, MAX_TOKENS_LIMIT),
    ("top_k", -1, 2**31 - 1),
)

#: Field names whose values travel as columns instead of in the Submit header.
COLUMN_FIELDS = ("allowed_token_ids", "logit_bias")
FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))


def _check_float(name: str, value: object, low: float, high: float, *, low_exclusive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SamplingError(name, f"{name} must be a number, got {shown(value)}.")
    # Written so that NaN, for which every comparison is false, is refused.
    above = value > low if low_exclusive else value >= low
    if not (above and value <= high and math.isfinite(value)):
        lower = "above" if low_exclusive else "at least"
        raise SamplingError(name, f"{name} must be {lower} {low:g} and at most {high:g}, got {shown(value)}.")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(name, f"{name} must be an integer, got {shown(value)}.")
    if not low <= value <= high:
        raise SamplingError(name, f"{name} must be between {low} and {high}, got {shown(value)}.")


def _check_ids(name: str, ids: object, most: int, vocab_size: int | None) -> None:
    if not isinstance(ids, tuple):
        raise SamplingError(name, f"{name} must be a list of token ids, got {shown(ids)}.")
    if len(ids) > most:
        raise SamplingError(name, f"{name} takes at most {most} token ids, got {len(ids)}.")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise SamplingError(name, f"{name} must hold token ids (integers from 0), got {shown(token)}.")
        if token > _MASK32 or (vocab_size is not None and token >= vocab_size):
            limit = vocab_size if vocab_size is not None else _MASK32 + 1
            raise SamplingError(name, f"{name}: token id {token} is outside the vocabulary of {limit}.")


def _check_bad_words(words: object, vocab_size: int | None) -> None:
    if not isinstance(words, tuple) or len(words) > MAX_BAD_WORDS:
        raise SamplingError("bad_words", f"bad_words must be at most {MAX_BAD_WORDS} lists of token ids.")
    for word in words:
        _check_ids("bad_words", word, MAX_BAD_WORD_IDS, vocab_size)
        if not word:
            raise SamplingError("bad_words", "bad_words must not hold an empty list.")


_SHOWN_CHARS = 80


def _bounded_repr() -> reprlib.Repr:
    """`repr` that looks at no more of a value than is shown: a peer chooses its size and its depth."""
    bounded = reprlib.Repr()
    bounded.maxlevel = 4
    bounded.maxlist = bounded.maxtuple = bounded.maxdict = 16
    bounded.maxstring = bounded.maxother = bounded.maxlong = _SHOWN_CHARS
    return bounded


_REPR = _bounded_repr()


def shown(value: object) -> str:
    """The value as an error text repeats it: bounded, and always encodable."""
    text = _REPR.repr(value)
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return text.encode("ascii", "backslashreplace").decode("ascii")


def from_mapping(values: Mapping[str, object]) -> dict[str, object]:
    """Only the known sampling fields of `values`; unknown header keys are ignored (minor versions)."""
    return {name: values[name] for name in FIELD_NAMES if name in values}


# --- noise ---------------------------------------------------------------------------------------


def splitmix64(x: int) -> int:
    """One output of SplitMix64 for the state `x` (Steele, Lea, Flood 2014), as an unsigned word."""
    z = (x + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def choice_seed(seed: int, j: int) -> int:
    """The seed of choice `j` among the `n` of its own prompt, as a signed 64-bit number.

    j counts within one prompt, so that a prompt gives the same alone or in a list.
    """
    word = splitmix64((seed + j * _GOLDEN) & _MASK64)
    return word - 2**64 if word >= 2**63 else word


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC'11). Words are unsigned 32-bit."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0 = (k0 + 0x9E3779B9) & _MASK32
        k1 = (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def noise_word(seed: int, position: int, token: int) -> int:
    """First Philox word for (choice seed, index in the whole sequence, token id)."""
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    return philox4x32((position, token, 0, 0), key)[0]


def gumbel(word: int) -> float:
    """Gumbel noise of a Philox word. Runners compute it in float32; this is the float64 value."""
    uniform = min((word >> 8) * 2.0**-24 + 2.0**-25, LARGEST_UNIFORM)
    return -math.log(-math.log(uniform))
