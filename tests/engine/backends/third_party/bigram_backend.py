"""A backend for sluicegate: after each token comes one that has followed it before in the same sequence."""

import hashlib
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
import torch

import kernels
from engine.config import EngineConfig
from engine.device.columns import u32_column
from engine.device.sampler import Sampler
from engine.device.scoring import ScoredRows, score
from engine.plan import LoadError, ModelInfo, PlanEntry, Progress, StepPlan, StepResult
from protocol import bundle


class BigramRunner:
    max_in_flight = 1

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._sampler = Sampler(config.max_num_seqs)
        self._sequences: dict[int, array[int]] = {}  # by slot
        self._launched: deque[StepPlan] = deque()

    def load(self, progress: Progress) -> ModelInfo:
        folder = Path(self._config.model or "")
        files = {name: (folder / name).read_text() for name in bundle.NAMES if (folder / name).is_file()}
        if "tokenizer.json" not in files:
            raise LoadError(f"{folder} has no tokenizer.json; name a folder with one as --model.")
        self._vocab_size = tokenizers.Tokenizer.from_str(files["tokenizer.json"]).get_vocab_size()
        kernels.start(cache_dir=self._config.cache_dir / "kernels")
        blob = bundle.pack(files)
        return ModelInfo(
            digest=hashlib.sha256(b"bigram 1" + blob).hexdigest(),
            numerics=hashlib.sha256(b"bigram 1" + blob + kernels.numerics_name().encode()).hexdigest(),
            vocab_size=self._vocab_size,
            context_length=self._config.max_model_len or 2048,
            block_size=self._config.block_size,
            num_blocks=4096,
            eos_ids=(),
            generation_defaults={},
            bundle=blob,
        )

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        for state in plan.entered:
            self._sequences[state.slot] = state.prompt_ids + state.generated_ids
            self._sampler.enter(state)
        rows = torch.cat([self._logits(entry) for entry in plan.entries])
        scored = ScoredRows.of(plan)
        scores = None if scored is None else score(lambda logits: logits, rows[scored.rows], scored)
        ends = np.cumsum([entry.count for entry in plan.entries]) - 1
        sampling = [(end, entry) for end, entry in zip(ends, plan.entries, strict=True) if entry.sample]
        if not sampling:
            return StepResult(plan.step, array("I"), scored=scores)
        slots = np.array([entry.slot for _, entry in sampling], np.int64)
        positions = np.array([entry.start + entry.count for _, entry in sampling], np.int64)
        sampled = self._sampler.sample(rows[[end for end, _ in sampling]], slots, positions)
        return StepResult(plan.step, u32_column(sampled.ids), sampled.logprobs, sampled.failed, scores)

    def close(self) -> None:
        self._sequences.clear()

    def _logits(self, entry: PlanEntry) -> torch.Tensor:
        """float32 [entry.count, vocab_size]: what follows each position of the entry."""
        ids = self._sequences[entry.slot]
        ids[entry.start : entry.start + entry.count] = entry.ids
        logits = torch.zeros(entry.count, self._vocab_size)
        for row, at in enumerate(range(entry.start, entry.start + entry.count)):
            for before, after in pairwise(ids[: at + 1]):
                logits[row, after] += 4.0 * (before == ids[at])
        return logits
