"""One model on one device: runs StepPlans, strictly in the order they were launched."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from engine.device.columns import u32_column
from engine.device.inputs import InputBuilder
from engine.device.kv import KVLayout
from engine.device.layer_program import LayerProgram
from engine.device.sampler import Sampler
from engine.device.scoring import ScoredRows, score
from engine.models.decoder import Decoder
from engine.plan import StepPlan, StepResult


class ModelRunner:
    """Owns the KV pool and all state of slots.

    `launch` only remembers a plan and `collect` runs it: on a CPU the forward pass has no other
    place to run. Plans may be launched ahead, their entries one id short.
    """

    def __init__(self, model: Decoder, kv: KVLayout, *, max_num_seqs: int, context_length: int) -> None:
        self._model = model
        self._layers = LayerProgram(model, kv.allocate(torch.device("cpu")))
        self._inputs = InputBuilder(
            max_num_seqs=max_num_seqs,
            max_blocks=-(-context_length // kv.block_size),
            block_size=kv.block_size,
        )
        self._sampler = Sampler(max_num_seqs)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Run the oldest launched plan."""
        plan = self._launched.popleft()
        for state in plan.entered:
            self._sampler.enter(state)
        inputs = self._inputs.build(plan)
        batch, num_sampled = inputs.batch, len(inputs.slots)
        scored = ScoredRows.of(plan)
        if scored is not None:
            assert batch.sampled is not None
            batch = replace(batch, sampled=torch.cat((batch.sampled, scored.rows)))
        hidden = self._layers.hidden(batch)
        scores = None if scored is None else score(self._model.logits, hidden[num_sampled:], scored)
        if not num_sampled:
            return StepResult(plan.step, u32_column(torch.empty(0)), scored=scores)
        sampled = self._sampler.sample(self._model.logits(hidden[:num_sampled]), inputs.slots, inputs.positions)
        self._inputs.remember(inputs.slots, sampled.ids)
        return StepResult(plan.step, u32_column(sampled.ids), sampled.logprobs, sampled.failed, scores)
