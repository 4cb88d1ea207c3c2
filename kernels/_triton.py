"""The only import of Triton. Loaded when the first GPU operator is, never on a start without a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tl", "triton"]
