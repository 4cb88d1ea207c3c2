"""RMS norm with the residual sum before it."""

from __future__ import annotations

from torch import Tensor

import kernels


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        #: The weight is in the dtype that `kernels.rms_norm` is to round by.
        self.rows = kernels.RowNorm(weight, eps)

    def __call__(self, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [M, hidden_size] (+ residual) → (normed, x + residual). Without x the residual is the sum already."""
        if x is None:
            assert residual is not None
            x, residual = residual, None
        return kernels.rms_norm(x, self.rows.weight, self.rows.eps, residual)
