"""What a step begins with on a GPU beside its ids, where the host does not wait to learn what the last one sampled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepStart:
    """All int32. `last_ids` [num_slots] is what was sampled last for a slot.

    Some of `cells`, the block tables one after the other, get new values, none of them twice: `num_changes` [1] says
    how many, `changes` [>= 2 * num_changes] has their indexes, then their values.
    """

    last_ids: Tensor
    cells: Tensor
    num_changes: Tensor
    changes: Tensor
