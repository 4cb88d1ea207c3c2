"""Sampling on a GPU in the order of `protocol.sampling`, without waiting for the device.

Steps in which no row changes its logits or asks for logprobs are the operator's alone and can be in
a graph. The state of penalties and biases is dense ([num_slots, vocab_size]) and lives on the
device, since the ids that change it are known there first; it is made when a request first needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.device.gpu_bad_words import GpuBadWords
from engine.device.staging import Columns, Ints
from engine.plan import SlotState
from protocol.sampling import SamplingParams

#: A slot's seed, temperature, top_k, top_p and min_p, and the int32 that they are sent as.
_PARAMETERS, _WORDS = Struct("=qfiff"), 6

#: Beyond every place.
_NEVER = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class _SlotRules:
    """What the host must know of a slot."""

    params: SamplingParams
    num_prompt: int
    biased: bool
    penalised: bool
    has_bad_words: bool
    masked_until_min: tuple[int, ...]

    def masks_ends(self, place: int) -> bool:
        return bool(self.masked_until_min) and place - self.num_prompt < self.params.min_tokens

    @property
    def plain_from(self) -> int:
        if self.biased or self.penalised or self.has_bad_words or self.params.logprobs is not None:
            return _NEVER
        return self.num_prompt + self.params.min_tokens if self.masked_until_min else 0


@dataclass(frozen=True, slots=True, eq=False)
class RowLogprobs:
    """Logprobs of the rows (of the sampled ones) that asked, on the device."""

    rows: list[int]
    k: int
    own: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor


class GpuSampler:
    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._shape = (max_num_seqs, vocab_size)
        self._rules: list[_SlotRules | None] = [None] * max_num_seqs
        self._parameters = [bytes(_PARAMETERS.size)] * max_num_seqs
        #: The place in its sequence from which on a slot's tokens need no more than `pick`, where it is not the first.
        self._plain_from: dict[int, int] = {}
        self._bias: Tensor | None = None  # -inf for what is not allowed
        self._in_prompt: Tensor | None = None
        self._generated: Tensor | None = None
        self._bad_words: GpuBadWords | None = None

    def enter(self, state: SlotState) -> None:
        """Take over a slot for a request."""
        slot, params = state.slot, state.sampling
        top_k = max(params.top_k, 0)
        numbers = state.seed, params.temperature, top_k, params.top_p, params.min_p
        self._parameters[slot] = _PARAMETERS.pack(*numbers)
        rules = _SlotRules(
            params=params,
            num_prompt=len(state.prompt_ids),
            biased=bool(params.logit_bias or params.allowed_token_ids),
            penalised=params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0,
            has_bad_words=bool(params.bad_words),
            masked_until_min=state.masked_until_min,
        )
        self._rules[slot] = rules
        self._plain_from.pop(slot, None)
        if plain_from := rules.plain_from:
            self._plain_from[slot] = plain_from
        if rules.biased:
            self._enter_bias(slot, params)
        if rules.penalised:
            self._enter_counts(state)
        if rules.has_bad_words:
            if self._bad_words is None:
                self._bad_words = GpuBadWords(self._shape[0], self._device)
            self._bad_words.enter(slot, params.bad_words, state.generated_ids)

    def fill_rows(self, columns: Columns[Ints], slots: list[int]) -> None:
        """The sampling parameters of `slots` as the first rows of the columns."""
        count = len(slots)
        words = memoryview(b"".join([self._parameters[slot] for slot in slots])).cast("i")
        columns.seeds[: 2 * count : 2], columns.seeds[1 : 2 * count : 2] = words[::_WORDS], words[1::_WORDS]
        columns.temperature[:count], columns.top_k[:count] = words[2::_WORDS], words[3::_WORDS]
        columns.top_p[:count], columns.min_p[:count] = words[4::_WORDS], words[5::_WORDS]

    def is_plain(self, slots: list[int], places: list[int]) -> bool:
        """Whether no row needs more than `pick`."""
        ruled = self._plain_from
        if ruled.keys().isdisjoint(slots):
            return True
        return all([place >= ruled.get(slot, 0) for slot, place in zip(slots, places, strict=True)])

    def pick(self, logits: Tensor, columns: Columns[Tensor], last_ids: Tensor) -> Tensor:
        """Ids int32 [num_sampled] for float32 logits [num_sampled, vocab_size]; below 0 where there is none."""
        return kernels.sample_ahead(
            logits,
            columns.temperature.view(torch.float32),
            columns.top_k,
            columns.top_p.view(torch.float32),
            columns.min_p.view(torch.float32),
            columns.seeds.view(torch.int64),
            columns.places,
            columns.slots,
            last_ids,
        )

    def sample(
        self,
        logits: Tensor,
        columns: Columns[Tensor],
        last_ids: Tensor,
        slots: list[int],
        places: list[int],
    ) -> tuple[Tensor, RowLogprobs | None]:
        """`pick` by all the rules of the first rows' slots. The logits stay as they are."""
        rules = [self._slot_rules(slot) for slot in slots]
        ids = self.pick(self._changed(logits, rules, slots, places), columns, last_ids)
        self._count(rules, slots, ids)
        asked = [row for row, rule in enumerate(rules) if rule.params.logprobs is not None]
        if not asked:
            return ids, None
        k = max(rules[row].params.logprobs or 0 for row in asked)
        index = self._send(asked)
        found = kernels.logprobs_ahead(logits.index_select(0, index), ids.index_select(0, index), k)
        return ids, RowLogprobs(asked, k, *found)

    def _changed(
        self,
        logits: Tensor,
        rules: list[_SlotRules],
        slots: list[int],
        places: list[int],
    ) -> Tensor:
        """Logits after bias, allowed ids, penalties and the masks of bad words and before min_tokens."""
        raw = logits
        biased = [row for row, rule in enumerate(rules) if rule.biased]
        penalised = [row for row, rule in enumerate(rules) if rule.penalised]
        early = [
            row * self._shape[1] + token_id
            for row, rule in enumerate(rules)
            if rule.masks_ends(places[row])
            for token_id in rule.masked_until_min
        ]
        worded = [row for row, rule in enumerate(rules) if rule.has_bad_words]
        if biased or penalised or early or worded:
            logits = raw.clone()
        if biased:
            assert self._bias is not None
            rows, of = self._send(biased), self._send([slots[row] for row in biased])
            bias = self._bias.index_select(0, of)
            # Assigned, not added: an infinite logit plus this one's infinity would be NaN.
            logits[rows] = torch.where(bias == -torch.inf, bias, logits.index_select(0, rows) + bias)
        if penalised:
            rows, of = self._send(penalised), self._send([slots[row] for row in penalised])
            logits[rows] = self._penalised(logits.index_select(0, rows), of, [rules[row].params for row in penalised])
        if early:
            logits.view(-1).index_fill_(0, self._send(early), -torch.inf)
        for row in worded:
            assert self._bad_words is not None
            self._bad_words.bar(logits[row], slots[row])
        return logits

    def _penalised(self, logits: Tensor, slots: Tensor, params: list[SamplingParams]) -> Tensor:
        assert self._generated is not None
        assert self._in_prompt is not None
        generated = self._generated.index_select(0, slots)
        known = self._in_prompt.index_select(0, slots) | (generated > 0)
        columns = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        sent = torch.tensor(columns, pin_memory=True).to(self._device, non_blocking=True)
        repetition, frequency, presence = sent.t().unsqueeze(-1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(known, repeated, logits)
        return logits - frequency * generated - presence * (generated > 0)

    def _count(self, rules: list[_SlotRules], slots: list[int], ids: Tensor) -> None:
        """Remember the sampled tokens of rows with penalties or bad words."""
        rows = [row for row, rule in enumerate(rules) if rule.penalised]
        if rows:
            assert self._generated is not None
            tokens = ids.index_select(0, self._send(rows)).clamp(min=0).to(torch.int64)
            cells = self._send([slots[row] for row in rows]) * self._shape[1] + tokens
            flat = self._generated.view(-1)
            flat.index_copy_(0, cells, flat.index_select(0, cells) + 1)
        for row, rule in enumerate(rules):
            if rule.has_bad_words:
                assert self._bad_words is not None
                self._bad_words.add(slots[row], ids[row])

    def _enter_bias(self, slot: int, params: SamplingParams) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._shape, device=self._device)
        row = torch.zeros(self._shape[1])
        if params.allowed_token_ids:
            row.fill_(-torch.inf)
            row[list(params.allowed_token_ids)] = 0.0
        for token_id, bias in params.logit_bias:
            row[token_id] += bias
        self._bias[slot].copy_(row.pin_memory(), non_blocking=True)

    def _enter_counts(self, state: SlotState) -> None:
        if self._generated is None or self._in_prompt is None:
            self._generated = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        size = self._shape[1]
        counts = np.bincount(np.frombuffer(state.generated_ids, np.uint32), minlength=size).astype(np.int32)
        prompt = np.zeros(size, np.bool_)
        prompt[np.frombuffer(state.prompt_ids, np.uint32)] = True
        self._generated[state.slot].copy_(torch.from_numpy(counts).pin_memory(), non_blocking=True)
        self._in_prompt[state.slot].copy_(torch.from_numpy(prompt).pin_memory(), non_blocking=True)

    def _send(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def _slot_rules(self, slot: int) -> _SlotRules:
        rules = self._rules[slot]
        assert rules is not None, f"slot {slot} is sampled before a request entered it"
        return rules
