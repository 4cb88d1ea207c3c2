"""Logprobs of prompt tokens, from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernels
from engine.device.columns import f32_column, u32_column
from engine.plan import StepPlan
from protocol.messages import Logprobs

#: Rows of logits at a time. A long prompt's at once would take gigabytes: 8192 rows of 151,936 columns are 5 GB.
SLICE_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """The tokens to score in a step, in plan order: `rows` [num_scored] are the rows of the step's tokens
    whose hidden states give the logprobs of `ids` [num_scored], both int64 on the host.
    """

    rows: Tensor
    ids: Tensor
    k: int

    @classmethod
    def of(cls, plan: StepPlan) -> ScoredRows | None:
        """None when the plan scores nothing, which is nearly always."""
        begin, k = 0, 0
        rows, ids = [], []
        for entry in plan.entries:
            if (scoring := entry.scoring) is not None:
                first = begin + scoring.first - 1 - entry.start
                rows.append(np.arange(first, first + len(scoring.ids)))
                ids.append(np.frombuffer(scoring.ids, np.uint32).astype(np.int64))
                k = max(k, scoring.k)
            begin += entry.count
        if not rows:
            return None
        return cls(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(ids)), k)


def score(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, scored: ScoredRows) -> Logprobs:
    """Logprobs of `scored` from their hidden states [num_scored, hidden_size], on a CPU."""
    found = [
        kernels.logprobs(logits_of(rows), ids, scored.k)
        for rows, ids in zip(hidden.split(SLICE_ROWS), scored.ids.split(SLICE_ROWS), strict=True)
    ]
    return Logprobs(
        scored.k,
        f32_column(torch.cat([part.own for part in found])),
        u32_column(torch.cat([part.rank for part in found])),
        u32_column(torch.cat([part.top_ids for part in found])),
        f32_column(torch.cat([part.top for part in found])),
    )
