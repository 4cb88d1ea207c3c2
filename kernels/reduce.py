"""Sums in a fixed order, for the plain-torch references.

`torch.sum` chooses its order by the shape and strides of the whole tensor, so a row's sum may
change with the number of rows. Here it is a tree of element-wise additions: each exactly rounded,
the same tree for every row.
"""

from __future__ import annotations

from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, which goes: the upper half is added to the lower one until one is left."""
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        total = low.clone()
        total.narrow(dim, 0, size - half).add_(high)
        x = total
    return x.squeeze(dim)
