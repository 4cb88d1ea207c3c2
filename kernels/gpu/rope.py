"""Rotary positions: the norm and the rotation of heads that attention of single tokens fuses, and the kernel that
does both for chunks and writes the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.norm import normed
from kernels.gpu.pool import stored

if TYPE_CHECKING:
    from kernels.attention import HeadNorms
    from kernels.kv_cache import KVScales

#: Heads of a program.
_HEADS = 8


@triton.jit
def summed(x, TREE: tl.constexpr):
    """Sums [R] of the rows of x [R, BLOCK_D], neighbours first with TREE: an order that no launch can change.

    Without it the lanes of a warp add up what each of them has of a row. That takes less, and all launches do the same
    where the pool has the type of queries and a head is 128 or 256 long (16 or 32 lanes of 8, compiled and counted).
    """
    if not TREE:
        return tl.sum(x, 1)
    ROWS: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    for level in tl.static_range(1, 9):
        if width >> level:
            left, right = tl.split(tl.reshape(x, (ROWS, width >> level, 2)))
            x = left + right
    return tl.reshape(x, (ROWS,))


@triton.jit
def turning(
    inside,
    d,
    table_ptr,
    position,
    norm_ptrs,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
):
    """What `rotated` needs beside the heads, and no kernel writes: cosines and sines [R, BLOCK_D] of `position` [R, 1],
    and with NORMED the weights of elements and of their partners.

    `table_ptr` is float32 [num_positions, ROTARY]: cosines, then sines. `inside` masks [R, BLOCK_D].
    """
    HALF: tl.constexpr = ROTARY // 2
    turned = d < ROTARY
    angle = position * ROTARY + (d % HALF)[None, :]
    cosine = tl.load(table_ptr + angle, mask=inside & turned[None, :], other=1.0)
    sine = tl.load(table_ptr + angle + HALF, mask=inside & turned[None, :], other=0.0)
    if NORMED:
        partner = tl.where(turned, (d + HALF) % ROTARY, d)
        weight = tl.load(norm_ptrs + d[None, :], mask=inside, other=0.0)
        partner_weight = tl.load(norm_ptrs + partner[None, :], mask=inside, other=0.0)
        return cosine, sine, weight, partner_weight
    else:
        return cosine, sine


@triton.jit
def rotated(
    pointers,
    inside,
    d,
    turn,
    eps,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Heads [R, BLOCK_D] at `pointers` [R, 1] turned by `turn`, which is `turning`'s, computed in float32, rounded to
    their type. `inside` masks [R, BLOCK_D]. NORMED: heads are normed first, and rounded; TREE is `summed`'s.
    """
    T: tl.constexpr = pointers.dtype.element_ty
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(d < ROTARY, (d + HALF) % ROTARY, d)
    sign = tl.where(d < HALF, -1.0, 1.0)[None, :]
    x = tl.load(pointers + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(pointers + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.fma(summed(x * x, TREE), 1.0 / D, eps))[:, None]
        x = normed(x, scale, turn[2], T).to(tl.float32)
        y = normed(y, scale, turn[3], T).to(tl.float32)
    return tl.fma(x, turn[0], (y * turn[1]) * sign).to(T)


@triton.jit(do_not_specialize=["first_row", "max_blocks"])
def rope_write_kernel(
    qkv_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    qkv_stride,
    first_row,
    max_blocks,
    key_scale,
    value_scale,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and HEADS heads: q normed and turned in place, k the same and v copied into the pool."""
    begin(PDL)
    row = first_row + tl.program_id(0)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    position = tl.load(positions_ptr + row)
    seq = tl.load(seq_index_ptr + row).to(tl.int64)
    if position < 0:
        return
    d = tl.arange(0, BLOCK_D)
    inside = (head < HQ + 2 * HKV) & (d < D)[None, :]
    pointers = qkv_ptr + row.to(tl.int64) * qkv_stride + head * D
    block = tl.load(block_tables_ptr + seq * max_blocks + position // BLOCK_SIZE).to(tl.int64)
    P: tl.constexpr = k_cache_ptr.dtype.element_ty
    TREE: tl.constexpr = qkv_ptr.dtype.element_ty != P or (D != 128 and D != 256)
    is_key = inside & (head >= HQ) & (head < HQ + HKV)
    is_value = inside & (head >= HQ + HKV)
    is_turned = inside & (head < HQ + HKV)
    norm_ptrs = tl.where(head < HQ, q_norm_ptr, k_norm_ptr)
    turn = turning(is_turned, d, table_ptr, position + head * 0, norm_ptrs, ROTARY, NORMED)
    wait(PDL)
    turned = rotated(pointers, is_turned, d, turn, eps, D, ROTARY, NORMED, TREE)
    value = tl.load(pointers + d[None, :], mask=is_value, other=0.0)
    tl.debug_barrier()  # every element is read as a partner before it is overwritten
    tl.store(pointers + d[None, :], turned, mask=inside & (head < HQ))
    key_slot = ((block * HKV + head - HQ) * BLOCK_SIZE + position % BLOCK_SIZE) * D
    tl.store(k_cache_ptr + key_slot + d[None, :], stored(turned, key_scale, P), mask=is_key)
    value_slot = key_slot - HKV * BLOCK_SIZE * D
    tl.store(v_cache_ptr + value_slot + d[None, :], stored(value, value_scale, P), mask=is_value)


def rope_write_(
    qkv: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    first_row: int,
    norms: HeadNorms | None,
    scales: KVScales,
) -> None:
    """For rows of qkv [M, (HQ + 2 * HKV) * D] from first_row on: norm and turn q in place, and k, which is written to
    the pool with v.

    `table` float32 [num_positions, rotary_dim]. A row whose position is below 0 is left alone. `scales` are those
    of an FP8 pool.
    """
    num_rows = qkv.shape[0] - first_row
    if num_rows == 0:
        return
    _, num_kv_heads, block_size, head_dim = v_cache.shape
    limit = limits(qkv.device)
    rope_write_kernel[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))](
        *(qkv, table, *((table, table) if norms is None else (norms.query, norms.key))),
        *(k_cache, v_cache, block_tables, seq_index, positions),
        *(
            qkv.stride(0),
            first_row,
            block_tables.shape[1],
            scales.key,
            scales.value,
            0.0 if norms is None else norms.eps,
        ),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=table.shape[1],
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        NORMED=norms is not None,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
