"""The seam between the control plane and a device: what a step is asked, what it answers.

Holds values only (arrays and frozen dataclasses), so that a plan can be sent to other ranks as
one flat int32 tensor, and the `Runner` protocol that every backend satisfies. No torch here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Logprobs
from protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotState:
    """A request as it enters a slot: new, resumed, or back after a preemption.

    It holds until another SlotState names the same slot. `masked_until_min` are the
    end-of-sequence and stop ids, which may not be sampled before `sampling.min_tokens`.
    """

    slot: int
    prompt_ids: array[int]  # u32
    generated_ids: array[int]  # u32, those the host knows
    sampling: SamplingParams
    seed: int
    masked_until_min: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prompt tokens whose logprobs a step makes: `ids` at the positions from `first` on, with the `k`
    most likely of each position. The hidden state one position before gives a token's.
    """

    first: int
    ids: array[int]  # u32, not empty
    k: int


@dataclass(slots=True)
class PlanEntry:
    """One request's share of a step: positions `start` to `start + count - 1` are computed.

    `ids` are the token ids at those positions; one id short (`len(ids) == count - 1`) when the
    last one is what the step before sampled for this slot, which the host has not read yet.
    `new_blocks` are appended to the slot's block table (emptied by a SlotState) before the step. They may
    hold positions before `start`, and the first position computed as well: what is written there is what
    others may be reading.
    With `sample`, the token at position `start + count` is sampled; its number among the
    generated ones is `start + count - len(prompt_ids)`. All of `scoring` follows from hidden states
    of this entry.

    A value like any other; not frozen, because one is made for each token and that takes three times as long.
    """

    slot: int
    start: int
    count: int
    ids: array[int]  # u32
    new_blocks: tuple[int, ...]
    sample: bool
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of a mixed batch. Entries of decodes come first, longest context first, then prefill chunks."""

    step: int
    entered: tuple[SlotState, ...]
    entries: tuple[PlanEntry, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.count for entry in self.entries)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the sampling entries of a plan got, in plan order.

    `logprobs` has a row for every sampled token when any of them asked; `k` is the largest asked
    for. `failed` names rows (index among the sampled ones) whose logits were not finite; their
    requests end with an error and the id is ignored. `scored` has the rows of the plan's scorings in
    plan order, `k` the largest asked for; a logprob is NaN where the logits were not finite.
    """

    step: int
    ids: array[int]  # u32 [num_sampled]
    logprobs: Logprobs | None = None
    failed: tuple[tuple[int, str], ...] = ()
    scored: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a backend found out while loading.

    `bundle` is the packed tokenizer bundle (`protocol.bundle`). `num_blocks` is the size of the
    KV block pool. `eos_ids` come from generation_config.json, then config.json. Without
    `prefix_caching` no request starts from another one's blocks, whatever the operator asked;
    without `prompt_logprobs` requests for them are refused, so that no plan has a `scoring`.
    `prefill_tokens` is how many tokens a step with both prompts and decodes may have, lest streams
    wait; None where the backend cannot say.
    """

    digest: str
    numerics: str
    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, object]
    bundle: bytes
    prefix_caching: bool = True
    prompt_logprobs: bool = True
    prefill_tokens: int | None = None


#: Called by `load` with (phase text, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]


class LoadError(Exception):
    """The model cannot be served as asked, now or at the next try. The text is for the operator: it
    names the file or option, and what to do."""


class Runner(Protocol):
    """A backend: owns the weights, the KV tensors and the sampler of one model.

    One thread calls it. `launch` starts a step and may return before it is done; at most
    `max_in_flight` steps, which may change, are launched and not collected. `collect` waits for the oldest one.
    A step k+1 may be launched while k runs; an entry one id short takes its last id from the
    device. Both raise only when the device is lost: the process then exits. `load` raises
    LoadError for what another try would not change.
    """

    @property
    def max_in_flight(self) -> int: ...

    def load(self, progress: Progress) -> ModelInfo: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...
