"""Products by cuBLASLt: by torch, which takes the algorithm the library guesses, or by one of ours that suits more.

With split-K forbidden all of them were measured to add over K in order. Beside torch's products in the type of their
operands, what a start has seen to do so on its device (`kernels.gpu.start`) is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.cublaslt import Algorithm, CublasltError, load
from kernels.gpu.launch import limits

#: In order of preference. On an H200 256 rows by 28672 x 4096 take 6 us less of 94 to 105: the guess, 256 columns, has
#: 224 programs for 132 processors. 1024 rows and more, which power limits, take 4 to 6 % less, by 6144 x 1024 12 %.
ALGORITHMS = (
    Algorithm(columns=176, rows=128, tile=201, cluster=5, option=2),
    Algorithm(columns=224, rows=128, tile=221, cluster=3, option=4),
)

#: From this on (`Algorithm.fill`) an algorithm of ours is no slower than the guess. Of 6144 x 4096, 8192 rows (0.996)
#: take 4 % less, 4096 rows (0.94) the same; of 4096 x 14336, 16,384 rows (0.94) take 2 % more.
_LEAST_FILL = 0.965


@dataclass(frozen=True, slots=True)
class Allowed:
    """`float32_results` of 16-bit operands, and algorithms of ours."""

    float32_results: bool = False
    algorithms: tuple[Algorithm, ...] = ()


_allowed: dict[torch.dtype, Allowed] = {}


def allow(dtype: torch.dtype, allowed: Allowed) -> None:
    """From now on, for operands of `dtype`, on all devices of this process."""
    _allowed[dtype] = allowed


def gives_float32(dtype: torch.dtype) -> bool:
    return _allowed.get(dtype, Allowed()).float32_results


def multiply(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x [M, K] times weight [N, K] transposed: [M, N] in x.dtype, or in float32 where that is allowed."""
    if out_dtype != x.dtype:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    algorithm = fitting(x, len(weight))
    y = None if algorithm is None else multiply_by(algorithm, x, weight)
    return torch.mm(x, weight.t()) if y is None else y


def fitting(x: Tensor, num_out: int) -> Algorithm | None:
    """The first algorithm of ours that keeps all processors busy."""
    for each in _allowed.get(x.dtype, Allowed()).algorithms:
        if each.fill(len(x), num_out, limits(x.device).num_sms) >= _LEAST_FILL:
            return each
    return None


def multiply_by(algorithm: Algorithm, x: Tensor, weight: Tensor) -> Tensor | None:
    """`multiply` by an algorithm of ours; None where there is no such thing here, or the library refuses."""
    try:
        library = load(x.device)
        return None if library is None else library.multiply(x, weight, algorithm)
    except CublasltError:
        return None
