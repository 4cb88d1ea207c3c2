"""Drives a Runner by hand-made plans, in any composition of steps that a scheduler could choose."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from engine.plan import PlanEntry, Runner, SlotState, StepPlan, StepResult
from protocol.messages import U32
from protocol.sampling import SamplingParams


@dataclass
class Sequence:
    """One choice on its way. `cached` are blocks that hold the first len(cached) * block_size positions."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int = 0
    ends: tuple[int, ...] = ()
    cached: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    preempt_after: int | None = None

    generated: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    pending: int = 0
    told: int = 0

    def __post_init__(self) -> None:
        self.generated = list(self.resumed)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return len(self.generated) + self.pending >= self.sampling.max_tokens


class Driver:
    """Hands out slots and blocks in a shuffled order, so that no test leans on them being in order."""

    def __init__(self, runner: Runner, *, num_blocks: int, block_size: int, max_num_seqs: int, seed: int = 0) -> None:
        self._runner = runner
        self._block_size = block_size
        self._blocks = list(range(num_blocks))
        self._slots = list(range(max_num_seqs))
        shuffle = random.Random(seed)
        shuffle.shuffle(self._blocks)
        shuffle.shuffle(self._slots)
        self._step = 0

    def run(self, sequences: list[Sequence], *, chunk: int = 10**9, depth: int = 1) -> list[list[int]]:
        """Generate all of them together, prompts in chunks of `chunk`, `depth` steps in flight."""
        in_flight: list[list[tuple[Sequence, PlanEntry]]] = []
        while True:
            held = {id(sequence) for step in in_flight for sequence, _ in step}
            for sequence in sequences:
                if sequence.preempt_after == len(sequence.generated) and id(sequence) not in held:
                    self._preempt(sequence)
            chosen = self._plan(sequences, chunk)
            if chosen:
                in_flight.append(chosen)
            if not in_flight:
                break
            if len(in_flight) == depth or not chosen:
                self._commit(in_flight.pop(0), self._runner.collect())
        for sequence in sequences:
            self._leave(sequence)
        return [sequence.generated for sequence in sequences]

    def run_alone(self, sequence: Sequence) -> Sequence:
        self.run([sequence])
        return sequence

    def _plan(self, sequences: list[Sequence], chunk: int) -> list[tuple[Sequence, PlanEntry]]:
        entered, chosen = [], []
        for sequence in sequences:
            if sequence.done:
                continue
            if sequence.slot < 0:
                entered.append(self._enter(sequence))
            chosen.append((sequence, self._entry(sequence, chunk)))
        chosen.sort(key=lambda item: item[1].count > 1)  # decodes first
        if chosen:
            self._step += 1
            self._runner.launch(StepPlan(self._step, tuple(entered), tuple(entry for _, entry in chosen)))
        return chosen

    def _enter(self, sequence: Sequence) -> SlotState:
        sequence.slot = self._slots.pop()
        sequence.blocks = list(sequence.cached)
        sequence.planned = len(sequence.cached) * self._block_size
        sequence.told = 0
        return SlotState(
            slot=sequence.slot,
            prompt_ids=array(U32, sequence.prompt),
            generated_ids=array(U32, sequence.generated),
            sampling=sequence.sampling,
            seed=sequence.seed,
            masked_until_min=sequence.ends,
        )

    def _entry(self, sequence: Sequence, chunk: int) -> PlanEntry:
        total = len(sequence.known) + sequence.pending
        start = sequence.planned
        count = min(total - start, chunk)
        assert count > 0
        while len(sequence.blocks) * self._block_size < start + count:
            sequence.blocks.append(self._blocks.pop())
        entry = PlanEntry(
            slot=sequence.slot,
            start=start,
            count=count,
            ids=array(U32, sequence.known[start : start + count]),
            new_blocks=tuple(sequence.blocks[sequence.told :]),
            sample=start + count == total,
        )
        sequence.told = len(sequence.blocks)
        sequence.planned = start + count
        sequence.pending += entry.sample
        return entry

    def _commit(self, step: list[tuple[Sequence, PlanEntry]], result: StepResult) -> None:
        failed = dict(result.failed)
        sampled = [sequence for sequence, entry in step if entry.sample]
        assert len(result.ids) == len(sampled)
        for row, sequence in enumerate(sampled):
            sequence.pending -= 1
            sequence.generated.append(result.ids[row])
            if row in failed:
                sequence.failures.append(failed[row])
            if sequence.sampling.logprobs is not None:
                columns = result.logprobs
                assert columns is not None
                top = slice(row * columns.k, row * columns.k + sequence.sampling.logprobs)
                sequence.logprobs.append(
                    (columns.own[row], columns.rank[row], tuple(columns.top_ids[top]), tuple(columns.top[top]))
                )

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preempt_after = None
        sequence.cached = []
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._slots.insert(0, sequence.slot)
            self._blocks[:0] = [block for block in sequence.blocks if block not in sequence.cached]
        sequence.slot = -1
