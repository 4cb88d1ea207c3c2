from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import kernels
from kernels.experts import mix_experts_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Random experts and rows with a choice of them."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    gate_up: Tensor  # [num_experts, 2 * inner, hidden]
    down: Tensor  # [num_experts, hidden, inner]

    @classmethod
    def draw(
        cls, rows: int, *, experts: int = 6, top_k: int = 3, hidden: int = 52, inner: int = 20, dtype: torch.dtype
    ) -> Case:
        x = torch.randn(rows, hidden).to(dtype)
        gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
        return cls(x, *kernels.route(torch.randn(rows, experts), top_k, renormalize=True), gate_up, down)

    @property
    def packed(self) -> kernels.PackedExperts:
        num_experts, hidden, inner = self.down.shape
        packed = kernels.empty_experts(num_experts, hidden, inner, dtype=self.x.dtype, device=CPU)
        for expert in range(num_experts):
            gate, up = self.gate_up[expert].chunk(2)
            packed.fill(expert, gate, up, self.down[expert])
        return packed

    def mix(self, packed: kernels.PackedExperts, rows: slice = slice(None)) -> Tensor:
        return kernels.mix_experts(self.x[rows], self.chosen[rows], self.weights[rows], packed)


def one_by_one(case: Case) -> Tensor:
    """Each row and expert by the operators of a dense MLP, added in float64."""
    gate_up = [kernels.pack_linear(weight) for weight in case.gate_up]
    down = [kernels.pack_linear(weight) for weight in case.down]
    total = torch.zeros(case.x.shape, dtype=torch.float64)
    for row, experts in enumerate(case.chosen.tolist()):
        for place, expert in enumerate(experts):
            gated = kernels.silu_and_mul(kernels.linear(case.x[row : row + 1], gate_up[expert]))
            answer = kernels.linear(gated, down[expert], out_dtype=torch.float32)
            total[row] += case.weights[row, place].double() * answer[0].double()
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (52, 20), (20, 7)])
def test_equals_dense_mlps_added_up(implementation: object, dtype: torch.dtype, hidden: int, inner: int) -> None:
    case = Case.draw(19, hidden=hidden, inner=inner, dtype=dtype)
    found = case.mix(case.packed)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), one_by_one(case), rtol=torch.finfo(dtype).eps, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_expert_of_weight_one_has_the_bits_of_a_dense_mlp(implementation: object, dtype: torch.dtype) -> None:
    case = Case.draw(9, experts=4, top_k=1, dtype=dtype)
    assert torch.equal(case.weights, torch.ones(9, 1))
    assert torch.equal(case.mix(case.packed), one_by_one(case).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(implementation: object, dtype: torch.dtype) -> None:
    """However many rows chose an expert."""
    case = Case.draw(100, experts=4, dtype=dtype)
    packed = case.packed
    whole = case.mix(packed)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (*range(1, 20), 64, 99):
            assert torch.equal(case.mix(packed, slice(rows)), whole[:rows]), (threads, rows)
            assert torch.equal(case.mix(packed, slice(-rows, None)), whole[-rows:]), (threads, rows)


def test_answers_are_added_in_the_order_of_the_choice(implementation: object) -> None:
    case = Case.draw(1, experts=3, hidden=1, inner=1, dtype=torch.float32)
    case.x[0] = 40.0
    case.gate_up[:] = 1.0  # silu(40) * 40 = 1600 exactly
    case.down[:, 0, 0] = torch.tensor([1e8, 1.0, -1e8]) / 1600
    case.weights[:] = 1.0
    for order, total in (([0, 2, 1], 1.0), ([0, 1, 2], 0.0), ([2, 1, 0], 0.0)):
        case.chosen[0] = torch.tensor(order)
        assert case.mix(case.packed).item() == total


def test_a_long_prompt_is_taken_in_parts(native: None) -> None:
    """Of 64 MiB of answers each: 4200 rows of 3 experts and 2048 dimensions are 98 MiB."""
    case = Case.draw(4200, experts=3, hidden=2048, inner=2, dtype=torch.bfloat16)
    packed = case.packed
    whole = case.mix(packed)
    for row in (0, 2729, 2730, 2731, 4199):
        assert torch.equal(case.mix(packed, slice(row, row + 1)), whole[row : row + 1])


def test_reads_rows_with_a_stride(implementation: object) -> None:
    case = Case.draw(9, dtype=torch.bfloat16)
    padded = torch.cat([case.x, torch.full((9, 8), torch.nan, dtype=case.x.dtype)], dim=1)
    view = Case(padded[:, :52], case.chosen, case.weights, case.gate_up, case.down)
    assert torch.equal(view.mix(case.packed), case.mix(case.packed))


def test_no_rows_give_no_rows(implementation: object) -> None:
    case = Case.draw(1, dtype=torch.float32)
    assert case.mix(case.packed, slice(0)).shape == (0, 52)


def test_native_and_reference_agree(native: None) -> None:
    case = Case.draw(30, dtype=torch.float32)
    wanted = mix_experts_reference(case.x, case.chosen, case.weights, case.gate_up, case.down)
    torch.testing.assert_close(case.mix(case.packed), wanted, rtol=1e-5, atol=1e-6)


def test_refuses_what_does_not_fit(implementation: object) -> None:
    case = Case.draw(2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x must be \[rows, 52\] for these experts, got \(2, 50\)"):
        kernels.mix_experts(case.x[:, :50], case.chosen, case.weights, case.packed)
    for wrong in (-1, 6):
        case.chosen[1, 2] = wrong
        with pytest.raises(IndexError, match=r"experts must be in 0\.\.5"):
            case.mix(case.packed)


def test_experts_belong_to_the_implementation_that_packed_them(native: None) -> None:
    case = Case.draw(2, dtype=torch.float32)
    packed = case.packed
    kernels.start(kernels.Implementation.REFERENCE)
    with pytest.raises(RuntimeError, match="packed for the native operators"):
        case.mix(packed)
