"""Which function a gated MLP has. Free of torch: a model's config is read before anything heavy is loaded."""

from __future__ import annotations

import enum


class Activation(enum.Enum):
    """The function of the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
