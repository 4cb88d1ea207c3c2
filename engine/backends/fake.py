"""A backend without a model: deterministic tokens at a set pace, and a strict judge of plans.

The token after a prefix is a pure function of the prefix's ids and, unless greedy, the seed, as
it is for a real model. The fake KV at a position is a hash of all ids up to it, made from the
hash that is *read from the pool* for the position before: a plan that hands out a wrong block
changes the tokens. Whatever else a plan may not do raises `PlanError`.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from engine.backends import fake_tokenizer
from engine.backends.fake_tokenizer import END_OF_TEXT, TURN_END, VOCAB_SIZE
from engine.config import EngineConfig
from engine.plan import ModelInfo, PlanEntry, Progress, SlotState, StepPlan, StepResult
from protocol.messages import U32, Logprobs
from protocol.sampling import SamplingParams, splitmix64

#: Raised whenever the same request would get other tokens.
FAKE_NUMERICS = 1

DEFAULT_CONTEXT = 8192

#: What it says when nothing restricts it: words of letters, a space after some five of them.
_ALPHABET = tuple(b"abcdefghijklmnopqrstuvwxyz      ")

#: A logit bias this large decides: no other token, or never this one.
_DECISIVE_BIAS = 50.0

_MASK64 = 2**64 - 1


class PlanError(RuntimeError):
    """The scheduler planned what no device could do right."""


def mix(state: int, token: int) -> int:
    """Fake KV of a position: from that of the position before and its token id."""
    return splitmix64((state * 0x9E3779B97F4A7C15 + token + 1) & _MASK64)


@dataclass(slots=True)
class _Slot:
    """What the runner knows of the request in a slot, apart from the pool's content."""

    entered: SlotState
    ids: array[int]
    table: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # one a computed position


@dataclass(frozen=True, slots=True)
class _Launched:
    result: StepResult
    ready_at: float


class FakeRunner:
    """Satisfies `engine.plan.Runner`. A step takes `fake_step_ms` + `fake_token_us` a token."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_in_flight = config.fake_depth
        self._config = config
        self._block_size = config.block_size
        self._step_s = config.fake_step_ms / 1e3
        self._token_s = config.fake_token_us / 1e6
        self._mean_length = config.fake_mean_length
        self._pool: list[list[int]] = []  # [num_blocks][positions written]
        self._slots: dict[int, _Slot] = {}
        self._launched: deque[_Launched] = deque()
        self._busy_until = 0.0

    def load(self, progress: Progress) -> ModelInfo:
        config = self._config
        parts = 20
        for part in range(parts):
            progress("weights", part, parts)
            time.sleep(config.fake_load_s / parts)
        progress("weights", parts, parts)
        self._pool = [[] for _ in range(config.fake_num_blocks)]
        identity = f"fake {FAKE_NUMERICS} mean_length={self._mean_length}"
        context_length = config.max_model_len or DEFAULT_CONTEXT
        return ModelInfo(
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            numerics=hashlib.sha256(f"{identity} numerics {config.fake_numerics}".encode()).hexdigest(),
            vocab_size=VOCAB_SIZE,
            context_length=context_length,
            block_size=self._block_size,
            num_blocks=config.fake_num_blocks,
            eos_ids=(TURN_END, END_OF_TEXT),
            generation_defaults={},
            bundle=fake_tokenizer.packed(context_length),
        )

    def launch(self, plan: StepPlan) -> None:
        if len(self._launched) >= self.max_in_flight:
            raise PlanError(f"step {plan.step}: {len(self._launched)} steps are in flight already")
        for entered in plan.entered:
            if self._config.fake_deadly_token in entered.prompt_ids:
                os._exit(1)  # as from a crash of the device: nothing is told to anybody
            self._slots[entered.slot] = _Slot(entered, entered.prompt_ids + entered.generated_ids)
        if len({entry.slot for entry in plan.entries}) != len(plan.entries):
            raise PlanError(f"step {plan.step}: a slot is planned twice")
        slots = [self._compute(plan.step, entry) for entry in plan.entries]
        scored = self._score(plan, slots)
        sampling = [slot for slot, entry in zip(slots, plan.entries, strict=True) if entry.sample]
        ids = array(U32)
        for slot in sampling:
            token = self._sample(slot)
            slot.ids.append(token)
            ids.append(token)
        now = time.monotonic()
        self._busy_until = max(now, self._busy_until) + self._step_s + self._token_s * plan.num_tokens
        logprobs = _logprobs(ids, [slot.entered.sampling for slot in sampling])
        result = StepResult(plan.step, ids, logprobs, scored=scored)
        self._launched.append(_Launched(result, self._busy_until))

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        wait = launched.ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return launched.result

    def close(self) -> None:
        pass

    def _compute(self, step: int, entry: PlanEntry) -> _Slot:
        """Write the fake KV of an entry's positions."""
        slot = self._slots.get(entry.slot)
        if slot is None:
            raise PlanError(f"step {step}: nothing has entered slot {entry.slot}")
        first = not slot.table
        slot.table += entry.new_blocks
        size, end = self._block_size, entry.start + entry.count
        if first:  # what comes before is a hit in the prefix cache
            for token in slot.ids[: entry.start]:
                slot.states.append(mix(slot.states[-1] if slot.states else 0, token))
        if entry.start != len(slot.states):
            raise PlanError(f"step {step}: slot {entry.slot} has {len(slot.states)} positions, not {entry.start}")
        if not entry.count or end > len(slot.table) * size or len(set(slot.table)) != len(slot.table):
            raise PlanError(f"step {step}: slot {entry.slot} cannot hold positions to {end} in blocks {slot.table}")
        if entry.sample != (end == len(slot.ids)) or len(slot.ids) < end:
            raise PlanError(f"step {step}: slot {entry.slot} knows {len(slot.ids)} tokens, the entry ends at {end}")
        ids = slot.ids[entry.start : end]
        if entry.ids not in (ids, ids[:-1]):
            raise PlanError(f"step {step}: slot {entry.slot} has other ids at {entry.start} than {entry.ids}")
        self._verify(step, slot)
        for position, token in enumerate(ids, entry.start):
            before = self._read(slot, position - 1) if position else 0
            state = mix(before, token)
            # What was behind it belonged to another: `_verify` finds out if that one still lives.
            self._pool[slot.table[position // size]][position % size :] = [state]
            slot.states.append(state)
        return slot

    def _verify(self, step: int, slot: _Slot) -> None:
        """The pool must hold what was computed for this prefix, in every block."""
        size, computed = self._block_size, len(slot.states)
        ends = [*range(size - 1, computed, size), *([computed - 1] if computed else [])]
        if any(self._read(slot, position) != slot.states[position] for position in ends):
            raise PlanError(f"step {step}: a block of slot {slot.entered.slot} holds another prefix")

    def _read(self, slot: _Slot, position: int) -> int:
        """Fake KV at a position, 0 where nothing was written."""
        content = self._pool[slot.table[position // self._block_size]]
        offset = position % self._block_size
        return content[offset] if offset < len(content) else 0

    def _score(self, plan: StepPlan, slots: list[_Slot]) -> Logprobs | None:
        """Prompt logprobs: the token's own hangs on the fake KV before it, as read from the pool."""
        pairs = zip(slots, plan.entries, strict=True)
        scorings = [(slot, entry.scoring) for slot, entry in pairs if entry.scoring is not None]
        if not scorings:
            return None
        k = max(scoring.k for _, scoring in scorings)
        rows = Logprobs(k, array("f"), array(U32), array(U32), array("f"))
        for slot, scoring in scorings:
            if scoring.ids != slot.entered.prompt_ids[scoring.first : scoring.first + len(scoring.ids)]:
                raise PlanError(f"step {plan.step}: slot {slot.entered.slot} has no such prompt at {scoring.first}")
            if scoring.first + len(scoring.ids) > len(slot.states) + 1:
                raise PlanError(f"step {plan.step}: slot {slot.entered.slot} scores what is not computed")
            for position, token in enumerate(scoring.ids, scoring.first):
                word = splitmix64(self._read(slot, position - 1))
                rows.own.append(-1.0 - (word % 4096) / 256)
                rows.rank.append(k + 1)
                rows.top_ids.extend((token + i) % VOCAB_SIZE for i in range(1, k + 1))
                rows.top.extend(-0.25 * i for i in range(1, k + 1))
        return rows

    def _sample(self, slot: _Slot) -> int:
        """The token after the slot's last position."""
        entered, sampling = slot.entered, slot.entered.sampling
        word = self._read(slot, len(slot.states) - 1)
        if not sampling.greedy:
            word ^= splitmix64(entered.seed & _MASK64)
        word = splitmix64(word)
        barred = {token for token, bias in sampling.logit_bias if bias <= -_DECISIVE_BIAS}
        if sampling.bad_words:
            barred |= _completing(sampling.bad_words, slot.ids[len(entered.prompt_ids) :])
        if len(slot.ids) - len(entered.prompt_ids) < sampling.min_tokens:
            barred.update(entered.masked_until_min)
        forced = tuple(token for token, bias in sampling.logit_bias if bias >= _DECISIVE_BIAS)
        candidates = forced or sampling.allowed_token_ids
        if not candidates:
            if self._mean_length and TURN_END not in barred and (word >> 32) % self._mean_length == 0:
                return TURN_END
            candidates = _ALPHABET
        if barred:
            candidates = tuple(token for token in candidates if token not in barred)
            candidates = candidates or tuple(token for token in range(VOCAB_SIZE) if token not in barred)
        return candidates[word % len(candidates)]


def _completing(words: tuple[tuple[int, ...], ...], generated: array[int]) -> set[int]:
    """Ids that would complete one of `words`."""
    known = tuple(generated)
    return {word[-1] for word in words if len(word) == 1 or known[1 - len(word) :] == word[:-1]}


def _logprobs(ids: array[int], asked: list[SamplingParams]) -> Logprobs | None:
    """Well-formed logprobs without a meaning: the token itself leads, its next neighbours follow."""
    ks = [sampling.logprobs for sampling in asked if sampling.logprobs is not None]
    if not ks:
        return None
    k = max(1, *ks)
    return Logprobs(
        k=k,
        own=array("f", [-0.5]) * len(ids),
        rank=array(U32, [1]) * len(ids),
        top_ids=array(U32, [(token + i) % VOCAB_SIZE for token in ids for i in range(k)]),
        top=array("f", [-0.5 * (i + 1) for i in range(k)]) * len(ids),
    )
