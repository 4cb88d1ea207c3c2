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


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The tokens of one step. All layers share it.

    `ids` int64 [num_tokens]; `cache_slots` int64 [num_tokens], where each token's key and value go;
    `attention` has their positions and block tables; `sampled` int64 [num_sampled] are the rows
    whose logits are wanted.
    """

    ids: Tensor
    cache_slots: Tensor
    attention: kernels.AttentionBatch
    sampled: Tensor


class Attention:
    """Rotates queries and keys, writes the pool, attends. Keys and values of this step are read
    back from the pool as well, so that a chunk's border changes no bit.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, rope: Tensor) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = float(head_dim**-0.5)
        self._rope = rope  # [num_positions, head_dim]

    def __call__(self, qkv: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] → [num_tokens, num_heads * head_dim]."""
        num_tokens = qkv.shape[0]
        heads = qkv.view(num_tokens, -1, self._head_dim)
        first_v = self._num_heads + self._num_kv_heads
        q, k, v = heads[:, : self._num_heads], heads[:, self._num_heads : first_v], heads[:, first_v:]
        kernels.rope_(q, k, batch.attention.positions, self._rope)
        kernels.write_kv(k, v, cache.keys, cache.values, batch.cache_slots)
        out = kernels.paged_attention(q, cache.keys, cache.values, batch.attention, scale=self._scale)
        return out.view(num_tokens, -1)
