"""Experts of a mixture: a gated MLP each, for the rows that chose it (grouped products).

Contract: an expert gives a row the bits of `linear` and `silu_and_mul`, however many rows chose it; its
answer is left in float32, times its weight, and a row's answers are added in the order of its choice, then
rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import silu_and_mul_reference
from kernels.backend import native
from kernels.cpu import pages
from kernels.cpu.library import DTYPES
from kernels.matmul import PANEL, fill_panels, linear_reference


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The experts of a layer, `num_experts` gated MLPs from `hidden_size` to `inner_size` and back, in two tensors.

    Opaque but for the sizes and `dtype`. `fill` puts one expert's weights in.
    """

    gate_up: Tensor  # of each expert as `PackedLinear.data`: the weight [2 * inner_size, hidden_size], gate first
    down: Tensor  # the same of [hidden_size, inner_size]
    num_experts: int
    hidden_size: int
    inner_size: int
    dtype: torch.dtype

    @property
    def in_panels(self) -> bool:
        return self.gate_up.dim() == 4

    def fill(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Copy in `gate` and `up` [inner_size, hidden_size] and `down` [hidden_size, inner_size]."""
        assert gate.shape == up.shape == (self.inner_size, self.hidden_size)
        assert down.shape == (self.hidden_size, self.inner_size)
        if self.in_panels:
            fill_panels(self.gate_up[expert], gate, up)
            fill_panels(self.down[expert], down)
        else:
            self.gate_up[expert, : self.inner_size] = gate
            self.gate_up[expert, self.inner_size :] = up
            self.down[expert] = down


def empty_experts(
    num_experts: int, hidden_size: int, inner_size: int, *, dtype: torch.dtype, device: torch.device
) -> PackedExperts:
    """Memory for the experts of a layer, in the layout that `mix_experts` reads on `device`."""
    shapes = (num_experts, 2 * inner_size, hidden_size), (num_experts, hidden_size, inner_size)
    if device.type != "cpu":
        gate_up, down = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    elif native() is None:
        gate_up, down = (torch.empty(shape, dtype=torch.float32) for shape in shapes)
    else:
        gate_up, down = (pages.zeros((n, -(-rows // PANEL), columns, PANEL), dtype) for n, rows, columns in shapes)
    return PackedExperts(gate_up, down, num_experts, hidden_size, inner_size, dtype)


def mix_experts(x: Tensor, chosen: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
    """The sum of what the chosen experts make of each row, times their weights: [M, hidden_size] in x.dtype.

    x [M, hidden_size] may be a view with a row stride; chosen int32 and weights float32 [M, top_k] as `route`
    answers them. Raises IndexError for an expert that is not there; a GPU does not look.
    """
    num_rows, hidden_size = x.shape
    if hidden_size != packed.hidden_size:
        raise ValueError(f"x must be [rows, {packed.hidden_size}] for these experts, got {tuple(x.shape)}.")
    assert chosen.shape == weights.shape == (num_rows, chosen.shape[1])
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert chosen.is_contiguous()
    assert weights.is_contiguous()
    if x.is_cuda:
        from kernels.gpu.experts import mix_experts as on_gpu

        return on_gpu(x, chosen, weights, packed.gate_up, packed.down)
    if not packed.in_panels:
        return mix_experts_reference(x, chosen, weights, packed.gate_up, packed.down)
    library = native()
    if library is None:
        raise RuntimeError("the experts were packed for the native operators, which are no longer in force.")
    assert x.stride(1) == 1
    y = torch.empty(num_rows, hidden_size, dtype=x.dtype)
    good = library.experts(
        *(x.data_ptr(), DTYPES[x.dtype], x.stride(0), num_rows, hidden_size),
        *(chosen.data_ptr(), weights.data_ptr(), chosen.shape[1]),
        *(packed.gate_up.data_ptr(), packed.down.data_ptr(), DTYPES[packed.dtype]),
        *(packed.num_experts, packed.inner_size, y.data_ptr()),
    )
    if not good:
        raise IndexError(f"experts must be in 0..{packed.num_experts - 1}.")
    return y


def mix_experts_reference(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    answers = x.new_empty(*chosen.shape, x.shape[1], dtype=torch.float32)
    for expert in chosen.unique().tolist():
        if not 0 <= expert < len(gate_up):
            raise IndexError(f"experts must be in 0..{len(gate_up) - 1}.")
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        both = linear_reference(x[rows], gate_up[expert], None).to(x.dtype)
        answers[rows, places] = linear_reference(silu_and_mul_reference(both), down[expert], None)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for place in range(chosen.shape[1]):
        total += weights[:, place, None] * answers[:, place]
    return total.to(x.dtype)
