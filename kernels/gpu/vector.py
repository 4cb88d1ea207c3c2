"""Products of a single row, each element a plain sum over all of K: faster than tiles, with other bits.

A program takes a few rows of the weight in one sweep, and has them in registers before it waits for the
kernel that makes x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gate import Activation
from kernels.gpu.activation import active_times
from kernels.gpu.launch import begin, limits, wait

#: More than this do not fit into a program's registers.
MOST_IN = 4096

#: Fewer columns than this are too few programs to fill the device.
LEAST_OUT = 4096

#: Elements of the weight that a program holds.
_HELD = 8192


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `kernels.gpu.matmul.linear_kernel`, of one row."""
    begin(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    n_inside, k_inside = n < NUM_OUT, k < NUM_IN
    w_ptrs = weight_ptr + tl.where(n_inside, n, 0).to(tl.int64)[:, None] * NUM_IN + k[None, :]
    w = tl.load(w_ptrs, mask=k_inside[None, :], other=0.0)
    if GATED:
        w_up = tl.load(w_ptrs + NUM_OUT * NUM_IN, mask=k_inside[None, :], other=0.0)
    wait(PDL)
    x = tl.load(x_ptr + k, mask=k_inside, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(w.to(tl.float32) * x, 1)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n_inside, other=0.0)
    T: tl.constexpr = y_ptr.dtype.element_ty
    if GATED:
        total_up = tl.sum(w_up.to(tl.float32) * x, 1)
        if HAS_BIAS:
            total_up += tl.load(bias_ptr + NUM_OUT + n, mask=n_inside, other=0.0)
        y = active_times(total, total_up, GELU, T)
    else:
        y = total.to(T)
    if ADD:
        y = (tl.load(residual_ptr + n, mask=n_inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(T)
    tl.store(y_ptr + n, y, mask=n_inside)


def is_fastest(x: Tensor, num_out: int) -> bool:
    """Whether `multiply` beats the tiles for x [M, K] and `num_out` columns (of a gated product, its result's)."""
    num_rows, num_in = x.shape
    return num_rows == 1 and num_in <= MOST_IN and num_out >= LEAST_OUT and x.dtype != torch.float32


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    gate: Activation | None = None,
) -> Tensor:
    """x [1, K] times weight [N, K] transposed, plus float32 bias [N]: [1, N], or with a `gate` [1, N / 2]. A
    `residual` [1, N] is added to the rounded product."""
    num_in, num_out = weight.shape[1], weight.shape[0] // (1 if gate is None else 2)
    y = torch.empty(1, num_out, dtype=out_dtype, device=x.device)
    limit, block = limits(x.device), triton.next_power_of_2(num_in)
    columns = max(1, _HELD // block // (1 if gate is None else 2))
    vector_kernel[(triton.cdiv(num_out, columns),)](
        *(x, weight, weight if bias is None else bias, y if residual is None else residual, y),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        BN=columns,
        BK=block,
        GATED=gate is not None,
        GELU=gate is Activation.GELU_TANH,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        PDL=limit.dependent,
        num_warps=4,
        **limit.options,
    )
    return y
