"""Tensors on the host to columns of the control plane."""

from __future__ import annotations

from array import array

import numpy as np
from torch import Tensor

from protocol.messages import F32, U32


def u32_column(values: Tensor) -> array[int]:
    """Non-negative int64 values of any shape as one u32 column."""
    return array(U32, values.numpy().astype(np.uint32).tobytes())


def f32_column(values: Tensor) -> array[float]:
    """float32 values of any shape as one column."""
    return array(F32, values.numpy().tobytes())
