"""A mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import kernels
from engine.layers.norm import RMSNorm
from engine.loading.weights import Weights
from engine.quant import ExpertParts, LinearMethod, LinearPart


class Experts:
    """Sends each token to the `top_k` experts of its largest router logits, and adds up what they answer.

    Router logits are float32, as is all that comes after the experts' products until the sum is rounded.
    """

    def __init__(
        self,
        reader: Weights,
        method: LinearMethod,
        router: LinearPart,
        experts: Sequence[ExpertParts],
        *,
        top_k: int,
        renormalize: bool,
    ) -> None:
        self._router = method.load_logits(reader, router)
        self._experts = method.load_experts(reader, experts)
        self._top_k = top_k
        self._renormalize = renormalize

    def __call__(self, norm: RMSNorm, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts make of the normed sum of x and residual [num_tokens, hidden_size], and that sum, to which
        it is to be added. Without x the residual is the sum already."""
        x, residual = norm(x, residual)
        chosen, weights = kernels.route(self._router.wide_product(x), self._top_k, renormalize=self._renormalize)
        return self._experts.mixed(x, chosen, weights), residual
