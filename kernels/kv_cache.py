"""The paged KV pool of one layer: its layout, and writing keys and values into it.

Keys lie [num_blocks, num_kv_heads, head_dim, block_size]: positions are contiguous, so that scores
of 16 keys are one vector and need no sum across its lanes. Values lie [num_blocks, num_kv_heads,
block_size, head_dim], head_dim padded to a multiple of 16, for the same reason in the other product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import native
from kernels.cpu.library import DTYPES, POOL_DTYPES

LANES = 16

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class KVScales:
    """What keys and values are divided by before the pool's dtype rounds them, and multiplied by once read:
    an FP8 pool holds numbers up to 448. Scales of 1 change no bit.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Shapes of the key and the value tensor of one layer (of a dtype in POOL_DTYPES, contiguous)."""
    if block_size < 1 or block_size % LANES:
        raise ValueError(f"block_size must be a positive multiple of {LANES}, got {block_size}.")
    padded = -(-head_dim // LANES) * LANES
    return (num_blocks, num_kv_heads, head_dim, block_size), (num_blocks, num_kv_heads, block_size, padded)


def empty_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, of the shapes of `kv_cache_shapes` and laid out for `device`.

    On a GPU the key tensor is a view of memory in the order of the values: a tile of keys is read in
    rows of head_dim. There head_dim must be a multiple of 16.
    """
    keys, values = kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    if device.type == "cpu":
        return torch.empty(keys, dtype=dtype), torch.empty(values, dtype=dtype)
    if head_dim % LANES:
        raise ValueError(f"on a GPU head_dim must be a multiple of {LANES}, got {head_dim}.")
    return torch.empty(values, dtype=dtype, device=device).transpose(2, 3), torch.empty(
        values, dtype=dtype, device=device
    )


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
) -> None:
    """Write k and v [M, num_kv_heads, head_dim] into the pool at `slots` int64 [M], each divided by its scale and
    rounded to the pool's dtype. FP8 saturates: beyond its largest number it is that.

    A slot is block * block_size + offset. k and v may be views with a row stride. Slots must
    differ from each other. Raises IndexError for a slot outside the pool.
    """
    library = native()
    if library is None:
        return write_kv_reference(k, v, k_cache, v_cache, slots, scales)
    num_blocks, num_kv_heads, head_dim, block_size = k_cache.shape
    assert (k_cache.shape, v_cache.shape) == kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k.dtype == v.dtype
    assert k.shape == v.shape == (slots.shape[0], num_kv_heads, head_dim)
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert slots.is_contiguous()
    if not library.write_kv(
        *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), DTYPES[k.dtype], slots.data_ptr(), slots.shape[0]),
        *(k_cache.data_ptr(), v_cache.data_ptr(), POOL_DTYPES[k_cache.dtype]),
        *(scales.key, scales.value),
        *(num_blocks, num_kv_heads, head_dim, block_size, v_cache.shape[3]),
    ):
        raise IndexError(f"slots must be in 0..{num_blocks * block_size - 1}, got {slots.min()}..{slots.max()}.")


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales) -> None:
    block_size = k_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, :, offsets] = _rounded(k.float() / scales.key, k_cache.dtype)
    v_cache[blocks, :, offsets, : v.shape[2]] = _rounded(v.float() / scales.value, v_cache.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is FP8:  # torch makes NaN of what is too large
        x = x.clamp(-torch.finfo(FP8).max, torch.finfo(FP8).max)
    return x.to(dtype)
