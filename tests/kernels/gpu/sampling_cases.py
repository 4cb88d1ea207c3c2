"""Rows of logits that are hard to pick from, and the noise and its bound for words of choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.noise import gumbel, gumbel_bound

_BLOCK = 4096


@triton.jit
def noise_and_bound_kernel(words_ptr, noise_ptr, bound_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(noise_ptr + at, gumbel(words))
    tl.store(bound_ptr + at, gumbel_bound(words))


def noise_and_bound(words: Tensor) -> tuple[Tensor, Tensor]:
    """float32 of int64 `words` below 2^32, in number a multiple of 4096."""
    noise, bound = torch.empty(2, len(words), device=words.device)
    noise_and_bound_kernel[(len(words) // _BLOCK,)](words, noise, bound, BLOCK=_BLOCK, enable_fp_fusion=False)
    return noise, bound


@dataclass(frozen=True, slots=True, eq=False)
class HardRows:
    """As `kernels.sample` takes them."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def draw(cls, vocab: int) -> HardRows:
        inf = torch.inf
        rows: list[tuple[Tensor, float, int, float, float]] = []

        def add(row: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
            rows.append((row, temperature, top_k, top_p, min_p))

        def normal(scale: float = 1.0, **at: float) -> Tensor:
            row = torch.randn(vocab) * scale
            for place, value in at.items():
                row[{"first": 0, "middle": vocab // 2, "last": vocab - 1}[place]] = value
            return row

        def equal(value: float, **at: float) -> Tensor:
            return torch.full((vocab,), value) if not at else normal(0.0, **at) + value

        for temperature in (0.01, 0.6, 2.0):
            add(normal(), temperature)
            add(normal(3.0, last=60.0), temperature)
            add(normal(1.0, first=200.0, last=200.0), temperature)
            add(equal(1.5), temperature)
            add(equal(-inf, middle=0.0), temperature)
            add(normal(1e4), temperature)
            add(equal(1e8), temperature)
        add(normal(1e-40), 2.0, top_k=2)
        add(normal() - 1000, 0.01, top_k=3)
        add(normal().round(), 0.6, top_k=50)
        add(normal(1e30), 1.0, top_k=1)
        add(torch.where(torch.arange(vocab) % 2 == 0, -inf, normal()), 0.6)
        add(normal(first=1e8, middle=1e8, last=1e8), 0.7)
        add(normal(), 0.8, top_p=0.9)
        add(normal(2.0), 0.6, top_k=100, top_p=0.8, min_p=0.01)
        add(normal(2.0), 1.0, min_p=0.1)
        for row in (normal(), normal().round(), equal(2.0), equal(-inf), normal(last=torch.nan), normal(middle=inf)):
            add(row, 0.0)
            add(row, 0.6)
        add(normal(first=3e38, middle=inf), 0.5)
        add(normal(first=3e38, last=-torch.nan), 0.5)
        columns = [torch.tensor(column) for column in zip(*(numbers for _, *numbers in rows), strict=True)]
        return cls(torch.stack([row for row, *_ in rows]), *columns)
