"""The KV block pool: how many blocks there are, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kernels
from engine.layers.attention import LayerCache
from engine.loading.store import ModelError
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pool of one model: `num_blocks` blocks of `block_size` positions in every layer. `scales` are those of
    its layers, none where all are 1.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scales: tuple[kernels.KVScales, ...] = ()

    def allocate(self, device: torch.device) -> list[LayerCache]:
        """One cache a layer. A CPU's memory is not touched, so it is taken as blocks come into use."""
        sizes = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        return [
            LayerCache(*kernels.empty_kv_cache(*sizes, dtype=self.dtype, device=device), scales)
            for scales in self.scales or (kernels.UNSCALED,) * self.num_layers
        ]


def plan_kv(
    spec: ModelSpec,
    *,
    block_size: int,
    dtype: torch.dtype,
    memory_bytes: int,
    context_length: int,
    scales: tuple[kernels.KVScales, ...] = (),
) -> KVLayout:
    """The pool that fits in `memory_bytes`. Raises ModelError when not even one full sequence does."""
    shapes = kernels.kv_cache_shapes(1, block_size, spec.num_kv_heads, spec.head_dim)
    block_bytes = spec.num_layers * dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes)
    num_blocks = memory_bytes // block_bytes
    needed = -(-context_length // block_size)
    if num_blocks < needed:
        raise ModelError(
            f"--max-model-len {context_length} needs {needed} KV blocks ({needed * block_bytes} bytes) for one "
            f"sequence, and --kv-cache-memory-bytes {memory_bytes} holds {num_blocks}. Raise the memory, or set "
            f"--max-model-len to at most {num_blocks * block_size}."
        )
    return KVLayout(num_blocks, block_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, scales)
