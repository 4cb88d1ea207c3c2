"""Self-attention over the paged pool, from the fused projection to the heads' output."""

from __future__ import annotations

from dataclasses import dataclass

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

    `ids` [num_tokens] (int64; int32 on a GPU, where -1 - slot stands for `last_ids`[slot], what the step
    before sampled); `cache_slots` int64 [num_tokens], where each token's key and value go (None on a
    GPU, which finds them itself); `attention` has their positions and block tables; `sampled`
    [num_sampled] are the rows whose logits are wanted, None for all of them.
    """

    ids: Tensor
    cache_slots: Tensor | None
    attention: kernels.AttentionBatch
    sampled: Tensor | None
    last_ids: Tensor | None = None


class Attention:
    """Norms queries and keys where the family does, rotates them, writes the pool, attends.

    `window` is how many positions a token sees, itself included, 0 for all; `soft_cap` is that of scores, 0 for none.
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
    ) -> None:
        self._num_heads = num_heads
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap
        self._rope = rope  # [num_positions, rotary_dim]
        self._norms = norms

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] → [num_tokens, num_heads * head_dim]."""
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
