"""The table of rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(num_positions: int, head_dim: int, theta: float) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of each position's angles, then sines.

    Angles are float32 products of position and inverse frequency, as transformers computes them.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
