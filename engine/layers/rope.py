"""Rotary positions: how each kind turns the dimensions of a head, and the table that operators read.

`rotary_dim` is how many of them, the first ones, are turned; most models turn all.

Every kind follows transformers (`modeling_rope_utils.py`) in float32. Some kinds, dynamic and long, turn
short and long contexts differently. transformers goes by the length seen so far, so that its result
depends on how a sequence was cut; here the length is that of the table, which is the context in force.

torch is imported where it is used: a model's config is read, rope and all, before anything heavy is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Plain rotary positions (Su et al., 2021). Equal ropes are equal values, so that layers share a table.

    `magnitude` multiplies cosines and sines.
    """

    theta: float
    magnitude: float = 1.0

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        """Radians a position, float32 [rotary_dim / 2], in a table of `num_positions`."""
        del num_positions
        return 1.0 / _wavelengths(self.theta, rotary_dim)

    def regime(self, num_positions: int) -> int:
        """What of the table's length its rows depend on. Equal numbers mean equal rows; 0 for most kinds."""
        del num_positions
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor`."""

    factor: float

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        del num_positions
        return 1.0 / _wavelengths(self.theta, rotary_dim) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope(Rope):
    """NTK-aware: plain up to `trained_positions`, and beyond that a base that grows with the context."""

    factor: float
    trained_positions: int

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        length = max(num_positions, self.trained_positions)
        stretch = self.factor * length / self.trained_positions - (self.factor - 1)
        return 1.0 / _wavelengths(self.theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)

    def regime(self, num_positions: int) -> int:
        return num_positions if num_positions > self.trained_positions else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedRope(Rope):
    """NTK-aware as in Qwen's first generation: plain up to `trained_positions`, then one base for contexts up to twice
    that, another up to four times, and so on.
    """

    trained_positions: int

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        alpha = 2 * self._doubled(num_positions) - 1
        return 1.0 / _wavelengths(self.theta * alpha ** (rotary_dim / (rotary_dim - 2)), rotary_dim)

    def regime(self, num_positions: int) -> int:
        doubled = self._doubled(num_positions)
        return doubled if doubled > 1 else 0

    def _doubled(self, num_positions: int) -> int:
        """The power of two by which `trained_positions` has to grow to hold the context."""
        times = -(-num_positions // self.trained_positions)
        return 1 << (times - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(Rope):
    """Long waves stretched by `factor`, short ones left, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_positions: int

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        import torch

        del num_positions
        plain = 1.0 / _wavelengths(self.theta, rotary_dim)
        length = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        stretched = torch.where(length > self.trained_positions / low, plain / self.factor, plain)
        blend = (self.trained_positions / length - low) / (high - low)
        between = (length >= self.trained_positions / high) & (length <= self.trained_positions / low)
        return torch.where(between, (1 - blend) * stretched / self.factor + blend * stretched, stretched)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al., 2023): dimensions that turn less than `beta_slow` times in the trained context are
    stretched by `factor`, those that turn more than `beta_fast` times left, a ramp between. `truncate` rounds
    the ramp's ends outwards to whole dimensions.
    """

    factor: float
    trained_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        import torch

        del num_positions
        wavelengths = _wavelengths(self.theta, rotary_dim)
        low, high = self._turning(self.beta_fast, rotary_dim), self._turning(self.beta_slow, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, without a division by 0
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        left = 1 - ramp
        return 1.0 / (self.factor * wavelengths) * (1 - left) + 1.0 / wavelengths * left

    def _turning(self, turns: float, rotary_dim: int) -> float:
        """The dimension that turns so many times in the trained context."""
        return rotary_dim * math.log(self.trained_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al., 2024): wavelengths times `short_factor` each in contexts up to `trained_positions`,
    times `long_factor` in longer ones. Both have rotary_dim / 2 numbers.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    trained_positions: int

    def frequencies(self, rotary_dim: int, num_positions: int) -> Tensor:
        import torch

        factors = self.long_factor if self.regime(num_positions) else self.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(self.theta, rotary_dim))

    def regime(self, num_positions: int) -> int:
        return int(num_positions > self.trained_positions)


def rope_table(rope: Rope, num_positions: int, rotary_dim: int) -> Tensor:
    """float32 [num_positions, rotary_dim]: cosines of each position's angles, then sines.

    Angles are float32 products of position and frequency, as transformers computes them.
    """
    import torch

    frequencies = rope.frequencies(rotary_dim, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.magnitude


def _wavelengths(theta: float, rotary_dim: int) -> Tensor:
    """Positions a radian, float32 [rotary_dim / 2]."""
    import torch

    powers: Tensor = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    return powers
