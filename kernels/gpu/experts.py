"""Experts of a mixture: rows are grouped by expert, multiplied in tiles of one expert each, and added up.

The host never learns how many rows an expert has. A row chooses an expert once, so that none has more rows than
the call: there are programs for as many tiles of every expert, and those without rows end at once (measured on
no GPU yet). Tiles add over K in order, as those of `matmul`; no sum depends on what other rows chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.activation import active_times
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.matmul import Tile, add_product, fitting_stages

_GROUP_BLOCK = 1024
_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(chosen_ptr, pairs_ptr, starts_ptr, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program an expert, and one for the end: where its pairs (row * top_k + place) begin, and which they are."""
    begin(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + first + lane, mask=first + lane < num_pairs, other=expert)
        before += (chosen < expert).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts_ptr + expert, start)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + first + lane, mask=first + lane < num_pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + start + tl.cumsum(mine, 0) - 1, first + lane, mask=mine > 0)
        start += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["row_tiles"])
def expert_linear_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    starts_ptr,
    y_ptr,
    row_tiles,
    x_stride,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: silu(x Wgᵀ) * (x Wuᵀ) of the rows of x that pairs name, written in the order of `pairs`. Else x Wᵀ of
    rows that lie in this order, written in that of the pairs themselves."""
    begin(PDL)
    EVEN_K: tl.constexpr = NUM_IN % BK == 0
    COLUMN_TILES: tl.constexpr = (NUM_OUT + BN - 1) // BN
    m_tile, rest = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    n_tile, expert = rest % COLUMN_TILES, rest // COLUMN_TILES
    wait(PDL)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    if start + m_tile * BM >= end:
        return
    m = start + m_tile * BM + tl.arange(0, BM)
    n = n_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_inside, n_inside = m < end, n < NUM_OUT
    pair = tl.load(pairs_ptr + m, mask=m_inside, other=0)
    GATE_TO_UP: tl.constexpr = NUM_OUT * NUM_IN
    w_row = expert.to(tl.int64) * (2 * NUM_OUT if GATED else NUM_OUT) + tl.where(n_inside, n, 0)
    w_ptrs = weight_ptr + w_row[:, None] * NUM_IN + k[None, :]
    x_row = pair // TOP_K if GATED else m
    x_ptrs = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for first in range(0, NUM_IN, BK):
        k_inside = k < NUM_IN - first
        x = tl.load(x_ptrs, mask=m_inside[:, None] if EVEN_K else m_inside[:, None] & k_inside[None, :], other=0.0)
        acc = add_product(x, w_ptrs, k_inside, acc, EVEN_K, False)
        if GATED:
            acc_up = add_product(x, w_ptrs + GATE_TO_UP, k_inside, acc_up, EVEN_K, False)
        x_ptrs += BK
        w_ptrs += BK
    T: tl.constexpr = y_ptr.dtype.element_ty
    y = active_times(acc, acc_up, False, T) if GATED else acc.to(T)
    y_row = m if GATED else pair
    cells = y_row.to(tl.int64)[:, None] * NUM_OUT + n[None, :]
    tl.store(y_ptr + cells, y, mask=m_inside[:, None] & n_inside[None, :])


@triton.jit
def add_up_kernel(
    answers_ptr, weights_ptr, y_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A row's answers times their weights, added in the order of its choice."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        answer = tl.load(answers_ptr + (row * TOP_K + place) * WIDTH + column, mask=inside, other=0.0)
        total = tl.fma(answer, tl.load(weights_ptr + row * TOP_K + place), total)
    tl.store(y_ptr + row * WIDTH + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def mix_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See `kernels.experts.mix_experts`: x [M, H], gate_up [num_experts, 2 * I, H], down [num_experts, H, I]."""
    num_rows, hidden_size = x.shape
    num_experts, _, inner_size = down.shape
    y = torch.empty(num_rows, hidden_size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    limit, top_k = limits(x.device), chosen.shape[1]
    num_pairs = chosen.numel()
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    group_kernel[(num_experts + 1,)](
        *(chosen, pairs, starts, num_pairs), BLOCK=_GROUP_BLOCK, PDL=limit.dependent, num_warps=4, **limit.options
    )
    gated = torch.empty(num_pairs, inner_size, dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, pairs, starts, gated, num_rows=num_rows, top_k=top_k, gated=True)
    answers = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    _multiply(gated, down, pairs, starts, answers, num_rows=num_rows, top_k=top_k, gated=False)
    add_up_kernel[(num_rows, triton.cdiv(hidden_size, _SUM_BLOCK))](
        *(answers, weights, y),
        WIDTH=hidden_size,
        TOP_K=top_k,
        BLOCK=_SUM_BLOCK,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
    return y


def choose_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for experts of a call of `num_rows`. Free to choose: all give the same bits."""
    if dtype == torch.float32:  # as in `matmul`: plain multiply-adds
        return Tile(16 if num_rows <= 16 else 64, 32, 32, 4, 2, swap=False)
    return Tile(16, 64, 128, 4, 4, swap=False) if num_rows <= 64 else Tile(64, 64, 64, 4, 4, swap=False)


def _multiply(
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    starts: Tensor,
    y: Tensor,
    *,
    num_rows: int,
    top_k: int,
    gated: bool,
) -> None:
    limit, tile = limits(x.device), choose_tile(num_rows, x.dtype)
    num_experts, num_out, num_in = len(weight), y.shape[1], weight.shape[2]
    row_tiles = triton.cdiv(num_rows, tile.rows)
    expert_linear_kernel[(row_tiles * triton.cdiv(num_out, tile.columns) * num_experts,)](
        *(x, weight, pairs, starts, y, row_tiles, x.stride(0)),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        TOP_K=top_k,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GATED=gated,
        PDL=limit.dependent,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, limit, x.element_size(), gated=gated),
        **limit.options,
    )
