"""Batched sampling in the order of `protocol.sampling`, with the state that each slot needs for it.

A row's result depends on that row alone. Rows that change no logits cost nothing beyond the
operator that picks the token; the others touch only the columns they name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kernels
from engine.device.bad_words import BadWords
from engine.device.columns import f32_column, u32_column
from engine.device.penalties import TokenCounts
from engine.plan import SlotState
from protocol.messages import Logprobs
from protocol.sampling import SamplingParams

_NOT_FINITE = "the model's logits were not finite"
_NONE_ALLOWED = "allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to sample"


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Ids int64 [num_sampled], 0 where `failed` (row, reason) names the row."""

    ids: Tensor
    logprobs: Logprobs | None
    failed: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _SlotRules:
    """What a slot's parameters do to its logits. Empty arrays and None mean: nothing."""

    params: SamplingParams
    num_prompt: int
    bias_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    allowed: npt.NDArray[np.int64]
    masked_until_min: npt.NDArray[np.int64]
    counts: TokenCounts | None
    bad_words: BadWords | None

    @classmethod
    def of(cls, state: SlotState) -> _SlotRules:
        params = state.sampling
        bias = dict(params.logit_bias)
        penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        return cls(
            params=params,
            num_prompt=len(state.prompt_ids),
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
            allowed=np.unique(np.array(params.allowed_token_ids, np.int64)),
            masked_until_min=np.array(state.masked_until_min, np.int64),
            counts=TokenCounts(state.prompt_ids, state.generated_ids) if penalised else None,
            bad_words=BadWords(params.bad_words, state.generated_ids) if params.bad_words else None,
        )

    def changes_logits(self, position: int) -> bool:
        changes = len(self.bias_ids) or len(self.allowed) or self.counts is not None or self.bad_words is not None
        return bool(changes) or self.masks_ends(position)

    def masks_ends(self, position: int) -> bool:
        """Whether the token at `position` comes before `min_tokens` are generated."""
        return len(self.masked_until_min) > 0 and position - self.num_prompt < self.params.min_tokens


class Sampler:
    def __init__(self, max_num_seqs: int) -> None:
        self._rules: list[_SlotRules | None] = [None] * max_num_seqs
        self._temperature = torch.zeros(max_num_seqs)
        self._top_p = torch.ones(max_num_seqs)
        self._min_p = torch.zeros(max_num_seqs)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._seeds = torch.zeros(max_num_seqs, dtype=torch.int64)

    def enter(self, state: SlotState) -> None:
        """Take over a slot for a request."""
        slot, params = state.slot, state.sampling
        self._rules[slot] = _SlotRules.of(state)
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._top_k[slot] = max(params.top_k, 0)
        self._seeds[slot] = state.seed

    def sample(self, logits: Tensor, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Sampled:
        """A token for each row of float32 `logits` [num_sampled, vocab_size], which may be overwritten.

        `positions` [num_sampled] are the indexes of the sampled tokens in their whole sequences.
        """
        rules = [self._slot_rules(slot) for slot in slots.tolist()]
        asked = [row for row, rule in enumerate(rules) if rule.params.logprobs is not None]
        raw = logits
        changed = [
            row for row, (rule, at) in enumerate(zip(rules, positions.tolist(), strict=True)) if rule.changes_logits(at)
        ]
        if changed:
            if asked:
                logits = raw.clone()
            _apply(logits, [(row, rules[row], int(positions[row])) for row in changed])
        index = torch.from_numpy(slots)
        ids = kernels.sample(
            logits,
            self._temperature[index],
            self._top_k[index],
            self._top_p[index],
            self._min_p[index],
            self._seeds[index],
            torch.from_numpy(positions),
        )
        failed = tuple((row, _reason(logits[row])) for row in (ids < 0).nonzero().flatten().tolist())
        if failed:
            ids = ids.clamp(min=0)
        for rule, token_id in zip(rules, ids.tolist(), strict=True):
            if rule.counts is not None:
                rule.counts.add(token_id)
            if rule.bad_words is not None:
                rule.bad_words.add(token_id)
        return Sampled(ids, _logprobs(raw, ids, rules, asked) if asked else None, failed)

    def _slot_rules(self, slot: int) -> _SlotRules:
        rules = self._rules[slot]
        assert rules is not None, f"slot {slot} is sampled before a request entered it"
        return rules


# --- what changes logits -------------------------------------------------------------------------


def _apply(logits: Tensor, rows: Sequence[tuple[int, _SlotRules, int]]) -> None:
    """Bias, allowed ids, penalties and the masks of bad words and before min_tokens, in place, on
    (row, rules, position).
    """
    width = logits.shape[1]
    flat = logits.view(-1)
    biased = [(row, rules) for row, rules, _ in rows if len(rules.bias_ids)]
    if biased:
        cells = _cells(width, [(row, rules.bias_ids) for row, rules in biased])
        flat[cells] += torch.from_numpy(np.concatenate([rules.bias for _, rules in biased]))
    limited = [(row, rules.allowed) for row, rules, _ in rows if len(rules.allowed)]
    if limited:
        cells = _cells(width, limited)
        kept = flat[cells]
        logits[[row for row, _ in limited]] = -torch.inf
        flat[cells] = kept
    penalised = [(row, rules.params, rules.counts) for row, rules, _ in rows if rules.counts is not None]
    if penalised:
        _penalise(flat, width, penalised)
    masked = [(row, rules.masked_until_min) for row, rules, position in rows if rules.masks_ends(position)]
    masked += [(row, rules.bad_words.barred) for row, rules, _ in rows if rules.bad_words is not None]
    if masked:
        flat[_cells(width, masked)] = -torch.inf


def _penalise(flat: Tensor, width: int, rows: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    sizes = torch.tensor([len(counts.ids) for _, _, counts in rows])

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes)

    cells = _cells(width, [(row, counts.ids) for row, _, counts in rows])
    generated = torch.from_numpy(np.concatenate([counts.generated for _, _, counts in rows]))
    repetition = column([params.repetition_penalty for _, params, _ in rows])
    frequency = column([params.frequency_penalty for _, params, _ in rows])
    presence = column([params.presence_penalty for _, params, _ in rows])
    values = flat[cells]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[cells] = values - frequency * generated - presence * (generated > 0)


def _cells(width: int, rows: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Tensor:
    """Flat indexes of (row, ids) in logits of `width` columns."""
    return torch.from_numpy(np.concatenate([ids + row * width for row, ids in rows]))


def _reason(logits: Tensor) -> str:
    """Why a row has no token: all of it masked, or something in it is no number."""
    return _NONE_ALLOWED if bool((logits == -torch.inf).all()) else _NOT_FINITE


# --- logprobs ------------------------------------------------------------------------------------


def _logprobs(raw: Tensor, ids: Tensor, rules: Sequence[_SlotRules], asked: Sequence[int]) -> Logprobs:
    """Columns for all rows, from the raw logits; rows that did not ask hold zeros."""
    k = max(rules[row].params.logprobs or 0 for row in asked)
    index = torch.tensor(asked)
    found = kernels.logprobs(raw.index_select(0, index), ids.index_select(0, index), k)
    num_rows = len(rules)
    own = torch.zeros(num_rows).index_copy(0, index, found.own)
    rank = torch.zeros(num_rows, dtype=torch.int64).index_copy(0, index, found.rank)
    top_ids = torch.zeros((num_rows, k), dtype=torch.int64).index_copy(0, index, found.top_ids)
    top = torch.zeros((num_rows, k)).index_copy(0, index, found.top)
    return Logprobs(k, f32_column(own), u32_column(rank), u32_column(top_ids), f32_column(top))
