"""Self-attention over the paged pool, from the fused projection to the heads' output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Keys and values of one layer, in the layout of `kernels.kv_cache_shapes`."""

    keys: Tensor
    values: Tensor
    scales: kernels.KVScales = kernels.UNSCALED


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The tokens of one step. All layers share it.

    `ids` [num_tokens] (int64; int32 on a GPU, where -1 - slot stands for what the step before sampled,
    in `start`); `cache_slots` int64 [num_tokens], where each token's key and value go (None on a
    GPU, which finds them itself); `attention` has their positions and block tables; `sampled`
    [num_sampled] are the rows whose logits are wanted, None for all of them. `pruned` is `attention` with a
    schedule of these rows alone, by which the last layer computes nothing else but keys and values; None: it
    computes all rows.
    """

    ids: Tensor
    cache_slots: Tensor | None
    attention: kernels.AttentionBatch
    sampled: Tensor | None
    start: kernels.StepStart | None = None
    pruned: kernels.AttentionBatch | None = None


class Attention:
    """Norms queries and keys where the family does, rotates them, writes the pool, attends.

    `window` is how many positions a token sees, itself included, 0 for all; `soft_cap` is that of scores, 0 for none;
    queries are multiplied by their position's `growth` (`log_growth`).
    """

    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        window: int,
        soft_cap: float,
        rope: Tensor,
        norms: kernels.HeadNorms | None,
        growth: Tensor | None,
    ) -> None:
        self._num_heads = num_heads
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap
        self._rope = rope  # [num_positions, rotary_dim]
        self._norms = norms
        self._growth = growth

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] → [num_tokens, num_heads * head_dim]."""
        if self._growth is not None:
            # Before the rotation, which keeps lengths. Padding on a GPU has positions below 0. Such layers cannot be
            # recorded (`kernels.program`) and run operator by operator.
            factors = self._growth.index_select(0, batch.attention.positions.clamp(min=0))
            qkv[:, : self._num_heads * cache.keys.shape[2]].mul_(factors.unsqueeze(1))
        out = kernels.rotate_and_attend(
            *(qkv, self._rope, cache.keys, cache.values, batch.attention, batch.cache_slots),
            num_heads=self._num_heads,
            scale=self._scale,
            window=self._window,
            soft_cap=self._soft_cap,
            norms=self._norms,
            scales=cache.scales,
        )
        return out.view(qkv.shape[0], -1)


def log_growth(trained: int, num_positions: int) -> Tensor | None:
    """How queries grow beyond the `trained` context, so that attention to more keys stays as sharp: float32
    [num_positions], for the n-th position log(n) / log(trained), at least 1. None where all are 1.
    """
    if trained < 2 or num_positions <= trained:
        return None
    logarithms = torch.arange(1, num_positions + 1, dtype=torch.float64).log() / math.log(trained)
    return logarithms.clamp(min=1.0).float()
