"""One model on one GPU, up to two steps in flight.

`launch` only queues work: sampled ids stay on the device for the step after, and are copied to pinned
memory behind an event that `collect` waits for. So the device goes from step to step while the host
plans the next one.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.device.gpu_inputs import GpuInputs, GpuLimits, Prepared
from engine.device.gpu_sampler import GpuSampler, RowLogprobs
from engine.device.graphs import capture
from engine.device.kv import KVLayout
from engine.device.returns import Returns
from engine.device.scoring import SLICE_ROWS, ScoredRows
from engine.device.staging import Layout
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.plan import StepPlan, StepResult
from protocol.messages import F32, U32, Logprobs

MAX_IN_FLIGHT = 2

#: As a u32: what the sampler answers for logits that are not finite.
_MINUS_ONE = 2**32 - 1

_NOT_FINITE = "the model's logits were not finite"
_NONE_ALLOWED = "allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to sample"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What a runner is built for. `dtype` is that of activations."""

    dtype: torch.dtype
    max_num_seqs: int
    max_num_tokens: int
    context_length: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A launched step, and what is on its way to pinned memory."""

    step: int
    num_sampled: int
    returns: Returns
    logprobs: RowLogprobs | None
    scored: RowLogprobs | None


class GpuRunner:
    """Owns the KV pool and all state of slots. Runs StepPlans strictly in the order they were launched."""

    @torch.inference_mode()
    def __init__(self, model: Decoder, spec: ModelSpec, kv: KVLayout, settings: GpuSettings) -> None:
        self._model = model
        self._caches = kv.allocate(settings.device)
        self._sampler = GpuSampler(settings.max_num_seqs, spec.vocab_size, settings.device)
        limits = GpuLimits(
            max_num_seqs=settings.max_num_seqs,
            max_num_tokens=settings.max_num_tokens,
            max_blocks=-(-settings.context_length // kv.block_size),
            block_size=kv.block_size,
            num_heads=spec.num_heads,
            query_tile=kernels.query_tile(spec.num_heads, spec.num_kv_heads, spec.head_dim, settings.dtype),
            short=kernels.short_tiles(spec.num_heads, spec.num_kv_heads, spec.head_dim, settings.dtype),
        )
        self._inputs = GpuInputs(limits, depth=MAX_IN_FLIGHT, device=settings.device, fill_rows=self._sampler.fill_rows)
        self._launched: deque[_InFlight] = deque()
        self._returns = deque(Returns(settings.max_num_seqs, settings.device) for _ in range(MAX_IN_FLIGHT))
        layouts = [*self._inputs.decode_layouts, *self._inputs.chunk_layouts]
        self._graphs = capture(layouts, self._forward, self._pick)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue a step. At most MAX_IN_FLIGHT may be launched and not collected."""
        assert len(self._launched) < MAX_IN_FLIGHT
        for state in plan.entered:
            self._sampler.enter(state)
        prepared = self._inputs.prepare(plan)
        scored = ScoredRows.of(plan)
        if scored is None:
            ids, logprobs, scores = *self._run(prepared), None
        else:
            ids, logprobs, scores = self._run_scoring(prepared, scored)
        returns = self._returns[0]
        self._returns.rotate()
        returns.send(ids)
        self._launched.append(_InFlight(plan.step, len(prepared.slots), returns, logprobs, scores))

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""
        flight = self._launched.popleft()
        ids, negative = flight.returns.wait(flight.num_sampled)
        failed = tuple([(row, _NOT_FINITE if ids[row] == _MINUS_ONE else _NONE_ALLOWED) for row in negative])
        logprobs = _columns(flight.logprobs, flight.num_sampled)
        scored = None if flight.scored is None else _columns(flight.scored, len(flight.scored.rows))
        return StepResult(flight.step, ids, logprobs, failed, scored)

    def _run(self, prepared: Prepared) -> tuple[Tensor, RowLogprobs | None]:
        if prepared.in_graph:
            graph = self._graphs[prepared.layout]
            graph.forward.replay()
            if self._sampler.is_plain(prepared.slots, prepared.places):
                graph.sampler.replay()
                return graph.ids, None
            logits = graph.logits
            columns = self._inputs.graph_columns(prepared.layout)
        else:
            batch, columns = self._inputs.batch(prepared)
            hidden = self._model.hidden(batch, self._caches)
            if not len(prepared.slots):
                return torch.empty(0, dtype=torch.int32, device=hidden.device), None
            logits = self._model.logits(hidden)
        ids, logprobs = self._sampler.sample(logits, columns, self._inputs.last_ids, prepared.slots, prepared.places)
        return ids, None if logprobs is None else _to_host(logprobs)

    def _run_scoring(self, prepared: Prepared, scored: ScoredRows) -> tuple[Tensor, RowLogprobs | None, RowLogprobs]:
        """As `_run`, without graphs, and the logprobs of prompt tokens."""
        num_sampled = len(prepared.slots)
        if prepared.in_graph:
            batch, columns = self._inputs.graph_batch(prepared.layout)
        else:
            batch, columns = self._inputs.batch(prepared)
        index = columns.index
        rows = scored.rows.to(index.dtype).pin_memory().to(index.device, non_blocking=True)
        batch = replace(batch, sampled=torch.cat((index[:num_sampled], rows)), pruned=None)
        hidden = self._model.hidden(batch, self._caches)
        scores = _to_host(self._scores(hidden[num_sampled:], scored))
        if not num_sampled:
            return torch.empty(0, dtype=torch.int32, device=hidden.device), None, scores
        logits = self._model.logits(hidden[:num_sampled])
        ids, logprobs = self._sampler.sample(logits, columns, self._inputs.last_ids, prepared.slots, prepared.places)
        return ids, None if logprobs is None else _to_host(logprobs), scores

    def _scores(self, hidden: Tensor, scored: ScoredRows) -> RowLogprobs:
        ids = scored.ids.to(torch.int32).pin_memory().to(hidden.device, non_blocking=True)
        found = [
            kernels.logprobs_ahead(self._model.logits(rows), tokens, scored.k)
            for rows, tokens in zip(hidden.split(SLICE_ROWS), ids.split(SLICE_ROWS), strict=True)
        ]
        return RowLogprobs(list(range(len(ids))), scored.k, *map(torch.cat, zip(*found, strict=True)))

    def _forward(self, layout: Layout) -> Tensor:
        batch, _ = self._inputs.graph_batch(layout)
        return self._model.logits(self._model.hidden(batch, self._caches))

    def _pick(self, layout: Layout, logits: Tensor) -> Tensor:
        columns = self._inputs.graph_columns(layout)
        return self._sampler.pick(logits, columns, self._inputs.last_ids)


def _to_host(found: RowLogprobs) -> RowLogprobs:
    """The same on its way to pinned memory; to be read after the step's event."""
    own, rank, top_ids, top = (
        column.to("cpu", non_blocking=True) for column in (found.own, found.rank, found.top_ids, found.top)
    )
    return RowLogprobs(found.rows, found.k, own, rank, top_ids, top)


def _columns(found: RowLogprobs | None, num_rows: int) -> Logprobs | None:
    """Columns for all rows; rows that did not ask hold zeros."""
    if found is None:
        return None
    own, rank = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.uint32)
    top_ids, top = np.zeros((num_rows, found.k), np.uint32), np.zeros((num_rows, found.k), np.float32)
    own[found.rows], rank[found.rows] = found.own.numpy(), found.rank.numpy()
    top_ids[found.rows], top[found.rows] = found.top_ids.numpy(), found.top.numpy()
    return Logprobs(
        found.k,
        array(F32, own.tobytes()),
        array(U32, rank.tobytes()),
        array(U32, top_ids.tobytes()),
        array(F32, top.tobytes()),
    )
