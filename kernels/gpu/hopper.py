"""Attention of chunks on compute capability 9.0: the bits of `prefill`, at more than twice its rate.

A program has three parts. One warp, `load`, has queries, keys and values copied to shared memory by the copy engine,
as far ahead as slots are free. Two groups of four warps, `attend`, have 64 of a tile's 128 rows each and their own
pace, so that one's softmax and the other's products use the SM at the same time. Within a group the products of a
tile's values run beside the softmax of the next tile, whose scores were asked for before them.

Programs stay: each takes items, a tile of queries and a group of heads, from a counter until none is left, so that
the loads of an item hide behind the one before, and all programs end together. Of the 168 registers a thread begins
with, `load` gives back all but 24 and `attend` has 240: the sums of a split and of all splits are 64 each at a head
size of 128.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kernels._gluon import TensorDescriptor, fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.prefill import packed_heads
from kernels.gpu.rings import (
    ROWS,
    TILE,
    Rings,
    Source,
    Work,
    announced,
    load,
    make_ring,
    release,
    wait_filled,
)
from kernels.gpu.softmax import NEGATIVE_INFINITY, shares, weigh

#: Tiles of keys, and of values, on their way or in use. Three are as fast.
_STAGES = 4


@gluon.jit
def ask_scores(q, ring, n):
    """Ask for the scores of the ring's n-th tile of keys, once it is there."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wait_filled(ring, n)
    keys = ring.slots.index(n % ring.filled.shape[0]).permute((1, 0))
    return warpgroup_mma(q, keys, gl.zeros((ROWS, TILE), gl.float32, LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def masked(scores, start, position):
    """Scores of the keys from `start` on, -inf for those behind a row's own position."""
    key = start + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
    return gl.where(key[None, :] <= position[:, None], scores, NEGATIVE_INFINITY)


@gluon.jit
def along(row, x):
    """A number a row as a column for x, whose rows are spread over threads in the same way."""
    return gl.convert_layout(row, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def merged(whole, split, unit):
    """`softmax.merge` where totals of a split are [ROWS, 8]."""
    top, total, out = whole
    later_top, later_total, later_out = split
    highest, fade, grow = shares(top, later_top, unit)
    later_total = gl.convert_layout(gl.max(later_total, 1), top.type.layout)
    total = gl.fma(total, fade, later_total * grow)
    return highest, total, gl.fma(out, along(fade, out), later_out * along(grow, out))


@gluon.jit
def advance(q, rings, ones, n, start, position, scale, weights, split, whole, goes_on, ends, MASKED: gl.constexpr):
    """(weights, split, whole) after the values of the n-th tile and the softmax of the next, whose keys begin at
    `start`. Without MASKED all rows see all of it.

    `weights` are the tile's; `split` is (top, total, out) of its split before it, already faded to its top, to be
    ignored unless the split `goes_on`; `whole` is that of all splits before. The tile `ends` its split or not.
    """
    top, total, out = split
    scores = ask_scores(q, rings.k, n + 1)
    wait_filled(rings.v, n)
    values = rings.v.slots.index(n % rings.v.filled.shape[0])
    out = warpgroup_mma(weights, values, out, use_acc=goes_on, is_async=True)
    total = warpgroup_mma(weights, ones, total, use_acc=goes_on, is_async=True)
    scores = warpgroup_mma_wait(2, deps=[scores])
    release(rings.k, n + 1)
    if MASKED:
        scores = masked(scores, start, position)
    before = top
    if ends:
        before = gl.full((ROWS,), NEGATIVE_INFINITY, gl.float32, top.type.layout)
    highest, fade, next_weights = weigh(scores, before, scale, MASKED)
    next_weights = gl.convert_layout(next_weights.to(weights.dtype), weights.type.layout)
    out, total, weights = warpgroup_mma_wait(0, deps=[out, total, weights])
    release(rings.v, n)
    if ends:
        whole = merged(whole, (top, total, out), scale)
    else:
        total, out = total * along(fade, total), out * along(fade, out)
    return next_weights, (highest, total, out), whole


@gluon.jit
def walk_keys(q, rings, ones, n, start, end, scale, GROUP: gl.constexpr, PACK: gl.constexpr, SPLIT: gl.constexpr):
    """All keys before `end`, the ring's from the n-th on, for queries from `start` on: (weights, split, whole) as
    `advance` has them, where the values of the last tile are still to come."""
    D: gl.constexpr = q.shape[1]
    EACH: gl.constexpr = SPLIT // TILE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    position = start + (GROUP * ROWS + gl.arange(0, ROWS, ROW)) // PACK
    nothing = gl.full((ROWS,), NEGATIVE_INFINITY, gl.float32, ROW)
    out = gl.zeros((ROWS, D), gl.float32, OUT)
    whole = (nothing, gl.zeros((ROWS,), gl.float32, ROW), out)

    scores = warpgroup_mma_wait(0, deps=[ask_scores(q, rings.k, n)])
    release(rings.k, n)
    top, _, weights = weigh(masked(scores, 0, position), nothing, scale, True)
    weights = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, OUT, 2))
    split = (top, gl.zeros((ROWS, 8), gl.float32, TOTAL), out)

    plain = gl.maximum((start + 1) // TILE - 1, 0) // EACH * EACH  # up to here all rows see the next tile as well
    for first in range(0, plain, EACH):
        for part in gl.static_range(EACH):
            tile = first + part
            weights, split, whole = advance(
                *(
                    q,
                    rings,
                    ones,
                    n + tile,
                    0,
                    position,
                    scale,
                    weights,
                    split,
                    whole,
                    part != 0,
                    part == EACH - 1,
                    False,
                )
            )
    for tile in range(plain, (end - 1) // TILE):
        goes_on, ends = tile % EACH != 0, tile % EACH == EACH - 1
        weights, split, whole = advance(
            *(q, rings, ones, n + tile, (tile + 1) * TILE, position, scale, weights, split, whole, goes_on, ends, True)
        )
    return weights, split, whole


@gluon.jit
def last_values(weights, split, ones, ring, n, start, end, spare, goes_on, PLAIN: gl.constexpr):
    """The split after the ring's n-th tile of values, whose keys begin at `start`. What it has from `end` on is
    nobody's or another's, perhaps NaN: the tile goes on through `spare` without it."""
    top, total, out = split
    wait_filled(ring, n)
    values = ring.slots.index(n % ring.filled.shape[0]).load(PLAIN)
    release(ring, n)
    key = start + gl.arange(0, TILE, gl.SliceLayout(1, PLAIN))
    spare.store(gl.where((key < end)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    out = warpgroup_mma(weights, spare, out, use_acc=goes_on, is_async=True)
    total = warpgroup_mma(weights, ones, total, use_acc=goes_on, is_async=True)
    out, total, weights = warpgroup_mma_wait(0, deps=[out, total, weights])
    return top, total, out


@gluon.jit
def attend(
    out_ptr,
    scale,
    value_scale,
    rings,
    ones,
    GROUP: gl.constexpr,
    HQ: gl.constexpr,
    PACK: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """The part of a group of warps."""
    D: gl.constexpr = rings.q.slots.shape[2]
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    num_items = 0
    num_tiles = 0
    first, count, start, head = announced(rings, 0)
    while count > 0:
        end = start + count
        q = rings.q.slots.index(num_items % 2 * 2 + GROUP)
        weights, split, whole = walk_keys(q, rings, ones, num_tiles, start, end, scale, GROUP, PACK, SPLIT)
        last = (end - 1) // TILE
        num_tiles += last + 1
        goes_on = last * TILE % SPLIT != 0
        split = last_values(weights, split, ones, rings.v, num_tiles - 1, last * TILE, end, q, goes_on, PLAIN)
        _, total, out = merged(whole, split, scale)
        # Through shared memory, so that a warp writes whole rows.
        q.store((out / along(total, out) * value_scale).to(q.dtype))
        row = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PLAIN))
        place = (first + row // PACK).to(gl.int64) * HQ + head + row % PACK
        out_ptrs = out_ptr + (place * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, PLAIN))[None, :]
        gl.store(out_ptrs, q.load(PLAIN), mask=(row // PACK < count)[:, None])
        fence_async_shared()
        release(rings.q, num_items)
        num_items += 1
        first, count, start, head = announced(rings, num_items)


@gluon.jit(do_not_specialize=["num_items", "max_blocks"])
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    tiles_ptr,
    taken_ptr,
    out_ptr,
    num_items,
    max_blocks,
    scale,
    value_scale,
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PACK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):
    begin(True)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    items = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = Rings(make_ring(dtype, 2, 2, D), make_ring(dtype, STAGES, 1, D), make_ring(dtype, STAGES, 1, D), items)
    # The sum of the weights is their product with ones, of which an instruction takes 8 columns or more.
    ones = gl.allocate_shared_memory(dtype, [8, TILE], gl.NVMMASharedLayout.get_default_for([8, TILE], dtype))
    ones.store(gl.full((8, TILE), 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    ones = ones.permute((1, 0))
    fence_async_shared()
    wait(True)
    work = Work(tiles_ptr, positions_ptr, taken_ptr, num_items)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    source = Source(q_desc, k_desc, v_desc, block_tables_ptr, seq_index_ptr, max_blocks)
    gl.warp_specialize(
        [
            (attend, (out_ptr, scale, value_scale, rings, ones, FIRST, HQ, PACK, SPLIT)),
            (attend, (out_ptr, scale, value_scale, rings, ones, SECOND, HQ, PACK, SPLIT)),
            (load, (source, work, rings, HQ, HKV, BLOCK_SIZE, PACK)),
        ],
        [4, 1],
        [240, 24],
    )


class _Memory(NamedTuple):
    """What a descriptor needs of a tensor. Descriptors are kept, and must not keep tensors' memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=1024)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor:
    """Making one takes longer than all else about an argument of a launch."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)  # or float16: as wide
    return TensorDescriptor(_Memory(address, dtype), list(shape), list(strides), list(box), layout)


def _pool_descriptor(cache: Tensor, block_size: int, head_dim: int) -> TensorDescriptor:
    box = (min(block_size, TILE.value), head_dim)
    return _descriptor(cache.data_ptr(), cache.dtype, (cache.numel() // head_dim, head_dim), (head_dim, 1), box)


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    tiles: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    scale: float,
    value_scale: float,
    split: int,
) -> None:
    """`prefill.attend_tiles` for what `prefill.takes_warpgroups` says."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = v_cache.shape
    pack = packed_heads(num_heads, num_kv_heads)
    box = (ROWS.value // pack, pack, head_dim)
    num_items = tiles.shape[0] * (num_heads // pack)
    limit = limits(q.device)
    hopper_prefill_kernel[(min(num_items, limit.num_sms),)](
        _descriptor(q.data_ptr(), q.dtype, tuple(q.shape), q.stride(), box),
        *(_pool_descriptor(cache, block_size, head_dim) for cache in (k_cache, v_cache)),
        *(block_tables, seq_index, positions, tiles, arrivals, out),
        *(num_items, block_tables.shape[1], scale, value_scale),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        PACK=pack,
        SPLIT=split,
        STAGES=_STAGES,
        num_warps=4,
        **limit.options,
    )
