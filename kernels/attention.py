"""Attention over the paged KV pool: one path for prefill and decode.

Contract: a query's keys, from its window's first position to its own, are walked in splits of 256
positions counted from 0, in tiles of 64 keys. A split is an online softmax in key order; splits are
merged left to right. All of it in float32, and none of it depends on the other queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import soft_capped
from kernels.backend import native
from kernels.cpu.library import DTYPES, POOL_DTYPES
from kernels.kv_cache import UNSCALED, KVScales, kv_cache_shapes, write_kv
from kernels.norm import head_norm_
from kernels.reduce import tree_sum
from kernels.rope import rope_

SPLIT = 256
TILE = 64

#: Queries the reference takes at once: bounds its temporaries (rows * heads * head_dim * TILE floats).
_REFERENCE_ROWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class TileSchedule:
    """How a GPU divides the queries of a step. It decides what runs together, never a bit.

    The first `num_single` rows are each alone of their sequence. `tiles` int32 [num_tiles, 2] are
    (first row, number of rows) of others: rows of one sequence with growing positions, at most
    `query_tile` of them. `items` int32 [num_items, 5] are the rest, as `ShortTiles` has them. No single row has more
    than `max_splits` splits of context. `arrivals` int32 [M * num_heads or more] is zero between calls; tiles
    are dealt out by its first cell. Rows in none of these are written to the pool and get no answer.

    In a graph the number of single rows changes from step to step: `num_single` is the most, and of `positions` int32
    those of single rows are in `single_positions` [num_single], of others in `chunk_positions` [M], each below 0 for
    the rows of the other kind. There is at least one of either. None: `positions` are those of both.
    """

    num_single: int
    tiles: Tensor
    items: Tensor
    max_splits: int
    arrivals: Tensor
    single_positions: Tensor | None = None
    chunk_positions: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Where the queries of a step stand. Built once a step and shared by all layers.

    `block_tables` int32 [num_seqs, max_blocks] (entries past a sequence's last block are not read),
    `seq_index` int32 [M] the row of block_tables, `positions` int32 [M]. Queries of one sequence
    that follow one another are computed together; any order is right. On a GPU a `schedule` says
    which, and a row with a position below 0 is padding.
    """

    block_tables: Tensor
    seq_index: Tensor
    positions: Tensor
    schedule: TileSchedule | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights [head_dim] of the norms of every query head and every key head, as `rms_norm` takes them."""

    query: Tensor
    key: Tensor
    eps: float


def rotate_and_attend(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    slots: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    norms: HeadNorms | None = None,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Self-attention from a fused projection qkv [M, (num_heads + 2 * num_kv_heads) * head_dim], which is
    overwritten: `head_norm_` (with `norms`) and `rope_` on queries and keys, `write_kv` at `slots` int64 [M],
    `paged_attention`. Answers [M, num_heads, head_dim].

    A GPU finds the slots in `batch` itself (None). Keys and values of this step are read back
    from the pool as well, so that a chunk's border changes no bit.
    """
    if qkv.is_cuda:
        from kernels.gpu.attention import rotate_and_attend as on_gpu

        return on_gpu(
            *(qkv, cos_sin, k_cache, v_cache, batch),
            num_heads=num_heads,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            norms=norms,
            scales=scales,
            tile=TILE,
            split=SPLIT,
        )
    assert slots is not None, "a CPU is told the slots"
    num_kv_heads, head_dim = k_cache.shape[1:3]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        head_norm_(q, norms.query, norms.eps)
        head_norm_(k, norms.key, norms.eps)
    rope_(q, k, batch.positions, cos_sin)
    write_kv(k, v, k_cache, v_cache, slots, scales)
    return paged_attention(q, k_cache, v_cache, batch, scale=scale, window=window, soft_cap=soft_cap, scales=scales)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Causal attention of q [M, num_heads, head_dim] to the pool (`kv_cache_shapes`): [M, num_heads, head_dim].

    Keys and values of the queries themselves must have been written, with these `scales`. `window` > 0 lets a query see
    that many positions, itself included; `soft_cap` > 0 makes scores soft_cap * tanh(score / soft_cap).
    num_heads must be a multiple of the pool's num_kv_heads. q may be a view with a row stride.
    Raises IndexError when a query names a sequence, position or block that does not exist.
    """
    library = native()
    if library is None:
        return paged_attention_reference(q, k_cache, v_cache, batch, scale, window, soft_cap, scales)
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, _, block_size = k_cache.shape
    tables, seq_index, positions = batch.block_tables, batch.seq_index, batch.positions
    assert q.stride()[1:] == (head_dim, 1)
    assert num_heads % num_kv_heads == 0
    assert (k_cache.shape, v_cache.shape) == kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert tables.dtype == seq_index.dtype == positions.dtype == torch.int32
    assert tables.is_contiguous()
    assert seq_index.shape == positions.shape == (num_tokens,)
    assert seq_index.is_contiguous()
    assert positions.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    if not library.attention(
        *(q.data_ptr(), q.stride(0), DTYPES[q.dtype], num_tokens, num_heads, head_dim),
        *(k_cache.data_ptr(), v_cache.data_ptr(), POOL_DTYPES[k_cache.dtype]),
        *(num_blocks, num_kv_heads, block_size, v_cache.shape[3]),
        *(tables.data_ptr(), tables.shape[0], tables.shape[1], seq_index.data_ptr(), positions.data_ptr()),
        *(scale * scales.key, window, soft_cap, scales.value, out.data_ptr()),
    ):
        raise IndexError(
            f"a query names a sequence, position or block that does not exist "
            f"({tables.shape[0]} sequences of {tables.shape[1]} blocks, of {num_blocks} with {block_size} positions)."
        )
    return out


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    soft_cap: float,
    scales: KVScales,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    for start in range(0, q.shape[0], _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        part = AttentionBatch(batch.block_tables, batch.seq_index[rows], batch.positions[rows])
        attended = _attend(q[rows].to(torch.float32) * (scale * scales.key), k_cache, v_cache, part, window, soft_cap)
        out[rows] = attended * scales.value
    return out


@dataclass(slots=True, eq=False)
class _Softmax:
    """State of an online softmax: largest score, sum of exponentials, weighted values."""

    top: Tensor  # [M, H]
    total: Tensor  # [M, H]
    out: Tensor  # [M, H, head_dim]

    @classmethod
    def empty(cls, rows: int, heads: int, head_dim: int) -> _Softmax:
        return cls(torch.full((rows, heads), -torch.inf), torch.zeros(rows, heads), torch.zeros(rows, heads, head_dim))

    def add(self, top: Tensor, total: Tensor, out: Tensor) -> None:
        """Join what was computed for later keys, relative to its own largest score."""
        highest = torch.maximum(self.top, top)
        # A row without keys yet has -inf on both sides; 0 keeps the difference from being NaN.
        base = torch.where(highest == -torch.inf, 0.0, highest)
        old, new = torch.exp(self.top - base), torch.exp(top - base)
        self.total = self.total * old + total * new
        self.out = self.out * old.unsqueeze(-1) + out * new.unsqueeze(-1)
        self.top = highest


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, window: int, soft_cap: float) -> Tensor:
    """float32 [M, H, head_dim] for scaled float32 queries."""
    rows, heads, head_dim = q.shape
    positions = batch.positions.long()
    first = (positions - window + 1).clamp(min=0) if window > 0 else torch.zeros_like(positions)
    last = int(positions.max())
    state = _Softmax.empty(rows, heads, head_dim)
    for split in range(int(first.min()) // SPLIT * SPLIT, last + 1, SPLIT):
        inner = _Softmax.empty(rows, heads, head_dim)
        for start in range(split, min(split + SPLIT, last + 1), TILE):
            keys = torch.arange(start, start + TILE)
            seen = (keys >= first.unsqueeze(1)) & (keys <= positions.unsqueeze(1))  # [M, TILE]
            k, v = _gather(k_cache, v_cache, batch, keys.clamp(max=last), seen, head_dim)
            inner.add(*_tile(q, k, v, seen, soft_cap))
        state.add(inner.top, inner.total, inner.out)
    return state.out / state.total.unsqueeze(-1)


def _gather(
    k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, keys: Tensor, seen: Tensor, head_dim: int
) -> tuple[Tensor, Tensor]:
    """K and V of positions `keys` [TILE] for each query, float32 [M, TILE, num_kv_heads, head_dim].

    What a query does not see is zero: it may be memory never written, and 0 * NaN is NaN.
    """
    block_size = k_cache.shape[3]
    tables = batch.block_tables.long()[batch.seq_index.long()]  # [M, max_blocks]
    blocks = tables[:, (keys // block_size).clamp(max=tables.shape[1] - 1)]  # [M, TILE]
    blocks = torch.where(seen, blocks, 0)
    offsets = (keys % block_size).expand_as(blocks)
    hidden = ~seen[:, :, None, None]
    k = k_cache[blocks, :, :, offsets].to(torch.float32).masked_fill(hidden, 0.0)
    v = v_cache[blocks, :, offsets, :head_dim].to(torch.float32).masked_fill(hidden, 0.0)
    return k, v


def _tile(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, soft_cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax parts (top, total, out) of one tile of keys."""
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)  # [M, TILE, H, head_dim]
    scores = tree_sum(q.unsqueeze(1) * k, dim=-1).transpose(1, 2)  # [M, H, TILE]
    if soft_cap > 0:
        scores = soft_capped(scores, soft_cap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    top = scores.amax(dim=-1)
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - base.unsqueeze(-1))  # [M, H, TILE]
    return top, tree_sum(weights, dim=-1), tree_sum(weights.transpose(1, 2).unsqueeze(-1) * v, dim=1)
