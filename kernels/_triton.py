"""The only import of Triton beside `kernels._gluon`. Loaded when the first GPU operator is, never without a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
