from __future__ import annotations

from array import array

import numpy as np
import torch

from engine.device.inputs import InputBuilder
from engine.plan import PlanEntry, SlotState, StepPlan
from protocol.messages import U32
from protocol.sampling import SamplingParams


def entered(slot: int) -> SlotState:
    return SlotState(slot, array(U32), array(U32), SamplingParams(), 0)


def test_mixed_batch() -> None:
    inputs = InputBuilder(max_num_seqs=4, max_blocks=4, block_size=16)
    inputs.build(
        StepPlan(
            1,
            (entered(2), entered(0)),
            (
                PlanEntry(2, 0, 17, array(U32, range(100, 117)), (9, 3), sample=True),
                PlanEntry(0, 0, 2, array(U32, [7, 8]), (5,), sample=False),
            ),
        )
    )
    inputs.remember(np.array([2]), torch.tensor([55]))
    step = inputs.build(
        StepPlan(
            2,
            (),
            (
                PlanEntry(2, 17, 1, array(U32), (), sample=True),
                PlanEntry(0, 2, 3, array(U32, [1, 2, 3]), (), sample=True),
            ),
        )
    )
    batch = step.batch
    assert batch.ids.tolist() == [55, 1, 2, 3]
    assert batch.attention.positions.tolist() == [17, 2, 3, 4]
    assert batch.attention.seq_index.tolist() == [2, 0, 0, 0]
    assert batch.attention.block_tables[2, :2].tolist() == [9, 3]
    assert batch.cache_slots.tolist() == [3 * 16 + 1, 5 * 16 + 2, 5 * 16 + 3, 5 * 16 + 4]
    assert batch.sampled.tolist() == [0, 3]
    assert (step.slots.tolist(), step.positions.tolist()) == ([2, 0], [18, 5])


def test_entering_empties_the_block_table() -> None:
    inputs = InputBuilder(max_num_seqs=1, max_blocks=2, block_size=16)
    for blocks in ((4, 5), (6,)):
        step = inputs.build(StepPlan(1, (entered(0),), (PlanEntry(0, 0, 1, array(U32, [1]), blocks, sample=False),)))
        assert step.batch.cache_slots.tolist() == [blocks[0] * 16]
        assert step.batch.sampled.tolist() == []
