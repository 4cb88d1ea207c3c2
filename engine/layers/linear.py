"""Linear layers, and the pair at the two ends of a decoder: embedding and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels
from engine.layers.norm import RMSNorm
from engine.loading.weights import Weights
from engine.quant import LinearMethod, LinearPart, LinearWeight


class Linear:
    """y = x Wᵀ + b for several checkpoint matrices of equal input at once (fused by rows)."""

    def __init__(self, reader: Weights, method: LinearMethod, parts: Sequence[LinearPart], *, bias: bool) -> None:
        self._weight = method.load(reader, parts)
        self._bias: Tensor | None = None
        if bias:
            # Added in float32 before the product is rounded, so it is kept so.
            self._bias = torch.cat(
                [reader.take(f"{part.name}.bias", (part.rows,), part.region[:1]) for part in parts]
            ).float()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, columns] → [M, rows of all parts]."""
        return self._weight.product(x, self._bias)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """The layer's output and the residual it is still to be added to, or None and their sum."""
        return self._weight.added_product(x, self._bias, residual)

    def after(self, norm: RMSNorm, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's output for what `norm` makes of x and the residual, and their sum, both as `norm` has them."""
        total = residual if x is None else x
        if x is not None and residual is not None:
            normed, total = norm(x, residual)
            return self(normed), total
        assert total is not None
        return self._weight.normed_product(total, norm.rows, self._bias), total

    def gated_after(
        self, norm: RMSNorm, x: Tensor | None, residual: Tensor, activation: kernels.Activation
    ) -> tuple[Tensor, Tensor]:
        """As `after`, the output being the activation of the first part times the second: [M, rows of one part]."""
        if x is None:
            return self._weight.normed_gated_product(residual, norm.rows, self._bias, activation), residual
        normed, residual = norm(x, residual)
        return self._weight.gated_product(normed, self._bias, activation), residual


class Embedding:
    """Token ids → hidden states. With a tied head it reads the head's packed rows.

    `scale` is rounded to `dtype` before it multiplies them, as transformers does.
    """

    def __init__(self, weight: Tensor | kernels.PackedLinear, dtype: torch.dtype, scale: float) -> None:
        self._weight = weight
        self._dtype = dtype
        self._scale = float(torch.tensor(scale, dtype=dtype))

    def __call__(self, ids: Tensor, start: kernels.StepStart | None) -> Tensor:
        """ids [M] → [M, hidden_size]; both as in `ForwardBatch`."""
        rows = self._rows(ids, start)
        return rows if self._scale == 1.0 else rows * self._scale

    def _rows(self, ids: Tensor, start: kernels.StepStart | None) -> Tensor:
        if start is not None:
            weight = self._weight if isinstance(self._weight, Tensor) else self._weight.data
            return kernels.embed_ahead(ids, start, weight, self._dtype)
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, ids).to(self._dtype)
        return self._weight.rows(ids).to(self._dtype)


class Head:
    """Hidden states → logits, in float32 whatever the model's dtype. `soft_cap` bounds them, 0 does not."""

    def __init__(self, weight: LinearWeight, soft_cap: float) -> None:
        self._weight = weight
        self._soft_cap = soft_cap

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, hidden_size] → float32 [B, vocab_size]."""
        logits = self._weight.wide_product(x)
        if self._soft_cap > 0:
            kernels.soft_cap_(logits, self._soft_cap)
        return logits
