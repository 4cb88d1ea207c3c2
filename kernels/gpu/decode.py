"""Attention of single tokens, with the rotation and the write of the new key and value.

A sequence's splits are spread over programs, each of which keeps its partial results in memory; the
last one to arrive merges them left to right. Where there are rows enough to fill the device, one
program walks all splits instead, but for the longest contexts among them. Few rows are all latency: their keys are
asked for before the projection is there. All give the bits of `prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.early import before_query, early_split, load_query
from kernels.gpu.launch import Limits, begin, limits, wait
from kernels.gpu.splits import merge_parts, one_split, walk_splits

if TYPE_CHECKING:
    from kernels.attention import HeadNorms
    from kernels.kv_cache import KVScales

#: Programs that a multiprocessor has at once, about.
_PROGRAMS_PER_SM = 4

#: KV heads of rows, a multiprocessor, up to which splits are spread, and over how many programs unless rows are few:
#: twice what 32 rows of one length want, for a long context among them (12,000 beside 31 of 1024: 104 to 78 us).
_HEADS_TO_SPREAD, _PROGRAMS = 2, 16

#: Where one program walks a row, 2 us a tile, contexts of more splits than these are shared out all the same, of so
#: many rows, the first, since decodes are planned longest context first. With more the device has work meanwhile.
_LONG_SPLITS, _LONG_ROWS = 16, 4

#: Registers a thread of a program that walks, so that a multiprocessor has room for five: without a bound the part for
#: long contexts takes 255, with heads of 128 it needs no more.
_WALK_REGISTERS = 192


@triton.jit
def parts_of(row, kv_head, max_splits, shared_rows, HQ: tl.constexpr, HKV: tl.constexpr):
    """The row's first part of a KV head, and the parts of all rows that are shared out."""
    first = (row * HKV + kv_head) * max_splits * (HQ // HKV)
    return first, shared_rows.to(tl.int64) * max_splits * HQ


@triton.jit
def keep_splits(
    q,
    query,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    position,
    first_split,
    num_splits,
    program,
    num_programs,
    kv_head,
    row,
    scale,
    cap,
    parts_ptr,
    outs_ptr,
    max_splits,
    shared_rows,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute this program's splits of the row, and leave them in memory. With EARLY nobody has waited yet."""
    GROUP: tl.constexpr = HQ // HKV
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)[None, :]
    inside = (r < GROUP)[:, None] & (d < D)
    first_part, plane = parts_of(row, kv_head, max_splits, shared_rows, HQ, HKV)
    for index in range(program, num_splits, num_programs):
        split = (first_split + index) * SPLIT
        if EARLY:
            q, top, total, out = early_split(
                *(q, query, index == program, k_cache_ptr, v_cache_ptr, table_ptr, position, split, kv_head),
                *(scale, cap, HQ, HKV, D, BLOCK_D, ROTARY, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT, NORMED, PDL),
            )
        else:
            top, total, out = one_split(
                *(q, k_cache_ptr, v_cache_ptr, table_ptr, position, split, position + 1, kv_head),
                *(scale, cap, HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
            )
        part = first_part + index * GROUP + r
        tl.store(parts_ptr + part, top, mask=r < GROUP)
        tl.store(parts_ptr + plane + part, total, mask=r < GROUP)
        tl.store(outs_ptr + part[:, None] * D + d, out, mask=inside)


@triton.jit
def store_row(
    out,
    out_ptr,
    row,
    kv_head,
    value_scale,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Heads of the row, out [ROWS, BLOCK_D], in their type."""
    GROUP: tl.constexpr = HQ // HKV
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    out_ptrs = out_ptr + (row * HQ + kv_head * GROUP + r) * D + d
    tl.store(out_ptrs, (out * value_scale).to(out_ptr.dtype.element_ty), mask=(r < GROUP) & (d < D))


@triton.jit
def arrive(
    parts_ptr,
    outs_ptr,
    arrivals_ptr,
    out_ptr,
    max_splits,
    shared_rows,
    num_splits,
    num_programs,
    kv_head,
    row,
    unit,
    value_scale,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The last of a row's programs merges and stores it."""
    tl.debug_barrier()
    counter = arrivals_ptr + row * HKV + kv_head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.minimum(num_programs, num_splits) - 1:
        tl.store(counter, 0)
        first_part, plane = parts_of(row, kv_head, max_splits, shared_rows, HQ, HKV)
        out = merge_parts(parts_ptr, outs_ptr, plane, first_part, num_splits, unit, HQ // HKV, D, BLOCK_D, ROWS)
        store_row(out, out_ptr, row, kv_head, value_scale, HQ, HKV, D, BLOCK_D, ROWS)


@triton.jit(do_not_specialize=["num_rows", "max_blocks", "max_splits", "shared_rows", "long_programs"])
def decode_kernel(
    qkv_ptr,
    rope_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_index_ptr,
    positions_ptr,
    parts_ptr,
    outs_ptr,
    arrivals_ptr,
    out_ptr,
    qkv_stride,
    max_blocks,
    num_rows,
    max_splits,
    shared_rows,
    long_programs,
    scale,
    cap,
    key_scale,
    value_scale,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    WALK: tl.constexpr,
    LONG: tl.constexpr,
    EARLY: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (kv head, row, p) takes the row's splits p, p + P, …; those that find none come last.

    With WALK a row has one program, which takes all, unless it is one of the first `shared_rows` and has more than LONG
    splits: behind the rows' first programs, in their dimension, stand `long_programs` - 1 others of each of these.
    """
    begin(PDL)
    kv_head, row, program, num_programs = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if WALK:
        other = row - num_rows
        is_first, shared = other < 0, tl.maximum(shared_rows, 1)
        program = tl.where(is_first, 0, 1 + other // shared)
        row = tl.where(is_first, row, other % shared)
    row = row.to(tl.int64)
    position = tl.load(positions_ptr + row)
    length = position + 1
    first_split = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    num_splits = tl.cdiv(length, SPLIT) - first_split
    is_alone = False
    if WALK:
        is_alone = (num_splits <= LONG) | (row >= shared_rows)
        num_programs = tl.where(is_alone, 1, long_programs)
        if program >= num_programs:
            return
    else:
        shared_rows = tl.num_programs(1)
    if program >= num_splits:
        return
    table_ptr = block_tables_ptr + tl.load(seq_index_ptr + row).to(tl.int64) * max_blocks
    query = before_query(
        *(qkv_ptr + row * qkv_stride, rope_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr, table_ptr),
        *(position, kv_head, key_scale, value_scale, eps, (num_splits - 1) % num_programs == program),
        *(HQ, HKV, D, BLOCK_D, ROTARY, BLOCK_SIZE, ROWS, NORMED),
    )
    q = tl.zeros((ROWS, BLOCK_D), qkv_ptr.dtype.element_ty)
    if not EARLY:
        wait(PDL)
        q = load_query(*query, HQ, HKV, D, BLOCK_D, ROTARY, ROWS, NORMED)
        tl.debug_barrier()  # what it wrote is read
    if is_alone:
        out = walk_splits(
            *(q, k_cache_ptr, v_cache_ptr, table_ptr, length, first_split, kv_head, scale, cap),
            *(HKV, D, BLOCK_D, BLOCK_SIZE, ROWS, WINDOW, CAPPED, TILE, SPLIT),
        )
        store_row(out, out_ptr, row, kv_head, value_scale, HQ, HKV, D, BLOCK_D, ROWS)
    else:
        keep_splits(
            *(q, query, k_cache_ptr, v_cache_ptr, table_ptr, position, first_split, num_splits, program),
            *(num_programs, kv_head, row, scale, cap, parts_ptr, outs_ptr, max_splits, shared_rows),
            *(HQ, HKV, D, BLOCK_D, ROTARY, BLOCK_SIZE, ROWS, WINDOW, CAPPED, EARLY, TILE, SPLIT, NORMED, PDL),
        )
        arrive(
            *(parts_ptr, outs_ptr, arrivals_ptr, out_ptr, max_splits, shared_rows, num_splits, num_programs),
            *(kv_head, row, 1.0 if CAPPED else scale, value_scale, HQ, HKV, D, BLOCK_D),
            triton.next_power_of_2(HQ // HKV) if WALK else ROWS,
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """How the splits of a row are shared out over `programs` of them. With `walk` only those of long contexts are, of
    the first rows, and one program walks those of any other. With `early` keys are asked for before the kernel before
    has ended, which takes registers and shared memory from it.
    """

    programs: int
    warps: int
    stages: int
    early: bool = False
    walk: bool = False

    def shared_rows(self, num_rows: int) -> int:
        """How many of `num_rows`, from the first on, may be shared out."""
        if not self.walk:
            return num_rows
        return min(num_rows, _LONG_ROWS) if self.programs > 1 else 0

    def grid(self, num_rows: int, num_kv_heads: int) -> tuple[int, int, int]:
        if not self.walk:
            return num_kv_heads, num_rows, self.programs
        return num_kv_heads, num_rows + self.shared_rows(num_rows) * (self.programs - 1), 1

    def options(self, q: Tensor, keys: Tensor) -> dict[str, int | None]:
        """Of a launch, for queries [..., D] and a pool of keys."""
        bounded = self.walk and q.shape[-1] == 128 and keys.element_size() == 2
        return {
            "num_warps": self.warps,
            "num_stages": 1 if q.element_size() == 4 else self.stages,
            "maxnreg": _WALK_REGISTERS if bounded else None,
        }


def choose_spread(num_rows: int, num_kv_heads: int, max_splits: int, *, limit: Limits, split_bytes: int) -> Spread:
    """Free to choose: all give the same bits. Tuned inside layers of two models on an H200. `split_bytes` are those of
    the keys and values of a split."""
    heads, num_sms = num_rows * num_kv_heads, limit.num_sms
    # Whether a row is walked goes by the number of rows alone: a step without a graph then finds the kernels of graphs,
    # whose contexts may be long, and compiles none. Programs that find no split end at once.
    at_most = max(2, max_splits)
    # A tile has two stages, since its addresses are loaded too: five have two tiles under way.
    if heads > _HEADS_TO_SPREAD * num_sms:
        programs = _PROGRAMS if max_splits > _LONG_SPLITS else 1
        # With more stages fewer programs have room beside each other.
        return Spread(programs, warps=2, stages=3, walk=True)
    if 2 * heads > num_sms:
        return Spread(min(at_most, _PROGRAMS), warps=2, stages=3)
    programs = min(at_most, _PROGRAMS_PER_SM * num_sms // heads)
    # A whole split under way (nine stages) would be one program to a multiprocessor: for a row alone 0.6 us less at
    # 1024, 2.7 in a small model's layers, and 5 us more at 4096, 9 at 8192, 30 at 32,768.
    deep = 5 * split_bytes // 8 <= limit.shared_memory
    return Spread(programs, warps=4, stages=5 if deep else 3, early=True)


def scratch_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int, context_length: int, split: int, limit: Limits
) -> int:
    """The most that `attend_rows` takes for parts: with more rows only few of them are shared out."""
    rows = min(max_rows, max(_HEADS_TO_SPREAD * limit.num_sms // num_kv_heads, _LONG_ROWS))
    return rows * num_heads * triton.cdiv(context_length, split) * (head_dim + 2) * 4


def _memory_of(parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Largest scores and totals [2, parts], and outputs [parts, head_dim]."""
    partial = torch.empty(2, parts, dtype=torch.float32, device=device)
    return partial, torch.empty(parts, head_dim, dtype=torch.float32, device=device)


def attend_rows(
    qkv: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_index: Tensor,
    positions: Tensor,
    arrivals: Tensor,
    out: Tensor,
    *,
    num_rows: int,
    max_splits: int,
    scale: float,
    cap: float,
    norms: HeadNorms | None,
    scales: KVScales,
    window: int,
    tile: int,
    split: int,
) -> None:
    """Fill the first `num_rows` rows of `out` [M, HQ, D], each the newest token of a sequence of its own.

    qkv [M, (HQ + 2 * HKV) * D] is a fused projection, whose heads are normed (with `norms`), turned by `table` (float32
    [num_positions, rotary_dim]) and written here. `arrivals` int32 [>= num_rows * HKV] is zero, and is left so.
    `max_splits` bounds the splits of a row. A position below 0 skips its row. `scale` is that of queries and of keys
    as the pool has them, `scales` those of an FP8 pool.
    """
    if num_rows == 0:
        return
    (_, num_heads, head_dim), (_, num_kv_heads, block_size, _) = out.shape, v_cache.shape
    limit = limits(qkv.device)
    split_bytes = 2 * split * head_dim * k_cache.element_size()
    spread = choose_spread(num_rows, num_kv_heads, max_splits, limit=limit, split_bytes=split_bytes)
    shared_rows = spread.shared_rows(num_rows)
    partial, outs = _memory_of(shared_rows * num_heads * max_splits, head_dim, qkv.device)
    decode_kernel[spread.grid(num_rows, num_kv_heads)](
        *(qkv, table, *((qkv, qkv) if norms is None else (norms.query, norms.key))),
        *(k_cache, v_cache, block_tables, seq_index, positions),
        *(partial, outs, arrivals, out, qkv.stride(0), block_tables.shape[1], num_rows, max_splits, shared_rows),
        *(spread.programs, scale, cap, scales.key, scales.value, 0.0 if norms is None else norms.eps),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=table.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads + 1)),
        WINDOW=window,
        CAPPED=cap > 0,
        WALK=spread.walk,
        LONG=_LONG_SPLITS,
        EARLY=spread.early,
        TILE=tile,
        SPLIT=split,
        NORMED=norms is not None,
        PDL=limit.dependent,
        **spread.options(out, k_cache),
        **limit.options,
    )
