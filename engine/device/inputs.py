"""From a StepPlan to the tensors of a forward pass, and the state of slots that this needs.

Lives on the host in numpy; the tensors handed out share its memory where they can. Entries are
walked once for what differs in length, everything per token is one array operation.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.layers.attention import ForwardBatch
from engine.plan import StepPlan
from protocol.messages import U32


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The tensors of a step. `slots` and `positions` [num_sampled] are those of the tokens to sample:
    a token's position is its index in the whole sequence.
    """

    batch: ForwardBatch
    slots: np.ndarray[tuple[int], np.dtype[np.int64]]
    positions: np.ndarray[tuple[int], np.dtype[np.int64]]


class InputBuilder:
    """Block tables and last sampled ids of all slots."""

    def __init__(self, *, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._tables_tensor = torch.from_numpy(self._tables)
        self._num_blocks = [0] * max_num_seqs
        self._last_ids = np.zeros(max_num_seqs, np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan's new slots and blocks, then lay out its tokens."""
        for state in plan.entered:
            self._num_blocks[state.slot] = 0
        ids = array(U32)
        short: list[tuple[int, int]] = []  # (row, slot) of last ids that only the device knows
        for entry in plan.entries:
            if entry.new_blocks:
                self._append_blocks(entry.slot, entry.new_blocks)
            ids.extend(entry.ids)
            if len(entry.ids) < entry.count:
                short.append((len(ids), entry.slot))
                ids.append(0)
        entries = plan.entries
        slots = np.fromiter((entry.slot for entry in entries), np.int64, len(entries))
        counts = np.fromiter((entry.count for entry in entries), np.int64, len(entries))
        starts = np.fromiter((entry.start for entry in entries), np.int64, len(entries))
        sampled = np.fromiter((entry.sample for entry in entries), np.bool_, len(entries))

        ends = np.cumsum(counts)
        seq_index = np.repeat(slots, counts)
        positions = np.arange(len(ids)) + np.repeat(starts - (ends - counts), counts)
        blocks = self._tables[seq_index, positions // self._block_size].astype(np.int64)
        token_ids = np.frombuffer(ids, np.uint32).astype(np.int64)
        for row, slot in short:
            token_ids[row] = self._last_ids[slot]
        batch = ForwardBatch(
            ids=torch.from_numpy(token_ids),
            cache_slots=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            attention=kernels.AttentionBatch(self._tables_tensor, _int32(seq_index), _int32(positions)),
            sampled=torch.from_numpy(ends[sampled] - 1),
        )
        return StepInputs(batch, slots[sampled], (starts + counts)[sampled])

    def remember(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]], ids: Tensor) -> None:
        """Keep the ids [num_sampled] just sampled, for entries that come one id short."""
        self._last_ids[slots] = ids.numpy()

    def _append_blocks(self, slot: int, blocks: tuple[int, ...]) -> None:
        have = self._num_blocks[slot]
        self._num_blocks[slot] = have + len(blocks)
        self._tables[slot, have : have + len(blocks)] = blocks


def _int32(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
