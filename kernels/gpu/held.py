"""Products of a few rows by small weights: a program has its whole part of the weight before it waits.

Such a product is all latency. Nothing writes weights, so they travel while the kernel before still runs; what
is left after the wait is to read x and one chain of tensor core instructions over K. The bits are those of
`kernels.gpu.matmul`: the same chain, of the same instructions' sums.

A single row can come as it is before its norm, which every program then computes for itself: less than
a launch costs, with the bits of `kernels.gpu.norm` (the same reduction by the same four warps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gate import Activation
from kernels.gpu.activation import active_times
from kernels.gpu.launch import begin, limits, wait
from kernels.gpu.norm import normed

if TYPE_CHECKING:
    from kernels.norm import RowNorm

#: Rows of x, padded to which they are the narrow operand of an instruction.
MOST_ROWS = 8

#: K of a dot, and the lengths of K that a program can hold: of several rows of x, and of one, which takes less.
_DEPTH = 1024
_LENGTHS, _LENGTHS_OF_ONE = (1024, 2048), (1024, 2048, 3072)

#: Bytes of weight and x that a program holds at most, so that two kernels' programs fit beside each other.
_HELD = 100 * 1024

#: More programs than this do not all run at once.
_MOST_PROGRAMS = 264


@triton.jit
def norm_of_row(x_ptr, weight, eps, WIDTH: tl.constexpr):
    """`kernels.gpu.norm` of the one row of WIDTH at `x_ptr`."""
    x = tl.load(x_ptr + tl.arange(0, WIDTH)).to(tl.float32)
    scale = tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / WIDTH, eps))
    return normed(x, scale, weight, x_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def held_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    x_stride,
    eps,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ALONE: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `kernels.gpu.matmul.linear_kernel`, with the weight as the left operand. GATED: gate and up are halves of one
    operand, so that their chains run side by side. ALONE: x is one row, which stands for all of the instruction's, so
    that little is to be read after the wait; NORMED: which is normed, and BK is NUM_IN."""
    begin(PDL)
    PARTS: tl.constexpr = 2 if GATED else 1
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.arange(0, PARTS * BN)
    column = tl.program_id(0) * BN + held % BN
    w_row = tl.where(column < NUM_OUT, column, 0) + held // BN * NUM_OUT
    w_ptrs = weight_ptr + w_row.to(tl.int64)[:, None] * NUM_IN + k[None, :]
    ws = ()
    for i in tl.static_range(NUM_IN // BK):
        ws = ws + (tl.load(w_ptrs + i * BK),)  # noqa: RUF005 (Triton knows no starred expressions)
    cells = m.to(tl.int64)[None, :] * NUM_OUT + n[:, None]
    inside = (m < num_rows)[None, :] & (n < NUM_OUT)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_row)
    if NORMED:
        norm = tl.load(norm_ptr + k)
    wait(PDL)
    xs = ()
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    for i in tl.static_range(NUM_IN // BK):
        if NORMED:
            x = norm_of_row(x_ptr, norm, eps, NUM_IN)
        elif ALONE:
            x = tl.load(x_ptr + i * BK + k)
        else:
            x = tl.load(x_ptrs + i * BK, mask=(m < num_rows)[:, None], other=0.0)
        xs = xs + (x,)  # noqa: RUF005
    if ADD:  # under way before the product, not after it
        residual = tl.load(residual_ptr + cells, mask=inside, other=0.0)
    T: tl.constexpr = y_ptr.dtype.element_ty
    acc = tl.zeros((PARTS * BN, BM), tl.float32)
    for i in tl.static_range(NUM_IN // BK):
        x = tl.broadcast_to(xs[i][None, :], (BM, BK)) if ALONE else xs[i]
        acc = tl.dot(ws[i], tl.trans(x), acc)
    if HAS_BIAS:  # no plain sum, or the compiler would begin the chain with the bias
        acc = tl.fma(acc, 1.0, bias[:, None])
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN, BM)), (1, 2, 0)))
        y = active_times(gate, up, GELU, T)
    else:
        y = acc.to(T)
    if ADD:
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(T)
    tl.store(y_ptr + cells, y, mask=inside)


def columns_of(x: Tensor, num_out: int, *, gated: bool, normed: bool = False) -> int | None:
    """Columns of a program for x [M, K] and `num_out` columns (of a gated product, its result's), or None where
    tiles are faster or do not fit."""
    num_rows, num_in = x.shape
    lengths = _LENGTHS_OF_ONE if num_rows == 1 and not normed else _LENGTHS
    if num_rows > MOST_ROWS or num_in not in lengths or x.dtype == torch.float32:
        return None
    columns = (32 if num_in == 1024 else 16) // (2 if gated else 1)
    if triton.cdiv(num_out, columns) > _MOST_PROGRAMS or limits(x.device).shared_memory < 2 * _HELD:
        return None
    return columns


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    columns: int,
    residual: Tensor | None = None,
    gate: Activation | None = None,
    norm: RowNorm | None = None,
) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus float32 bias [N]: [M, N], or with a `gate` [M, N / 2]. A
    `residual` of the result's shape is added to the rounded product. With a `norm` x is one row, and normed first."""
    num_rows, num_in = x.shape
    num_out = weight.shape[0] // (1 if gate is None else 2)
    assert norm is None or num_rows == 1
    assert residual is None or residual.is_contiguous()
    y = torch.empty(num_rows, num_out, dtype=out_dtype, device=x.device)
    limit = limits(x.device)
    held_kernel[(triton.cdiv(num_out, columns),)](
        *(x, weight if norm is None else norm.weight, weight, weight if bias is None else bias),
        *(y if residual is None else residual, y, num_rows, x.stride(0), 0.0 if norm is None else norm.eps),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        BM=MOST_ROWS,
        BN=columns,
        BK=_DEPTH if norm is None else num_in,
        ALONE=num_rows == 1,
        NORMED=norm is not None,
        GATED=gate is not None,
        GELU=gate is Activation.GELU_TANH,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
    return y
