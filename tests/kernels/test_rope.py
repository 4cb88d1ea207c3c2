import pytest
import torch

import kernels
from kernels.rope import rope_reference_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _table(rotary_dim: int, num_positions: int = 300) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(num_positions), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (20, 20), (2, 2), (24, 8)])
def test_turns_pairs_by_the_angle_of_their_position(
    implementation: object, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    table, half = _table(rotary_dim), rotary_dim // 2
    positions = torch.tensor([0, 7, 299, 7])
    q, k = torch.randn(4, 3, head_dim).to(dtype), torch.randn(4, 1, head_dim).to(dtype)
    turned_q, turned_k = q.clone(), k.clone()
    kernels.rope_(turned_q, turned_k, positions, table)
    for before, after in ((q, turned_q), (k, turned_k)):
        pairs = torch.complex(before[..., :half].double(), before[..., half:rotary_dim].double())
        turn = torch.complex(table[positions, :half].double(), table[positions, half:].double()).unsqueeze(1)
        exact = torch.cat([(pairs * turn).real, (pairs * turn).imag, before[..., rotary_dim:].double()], dim=-1)
        torch.testing.assert_close(after.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(after[..., rotary_dim:], before[..., rotary_dim:])
        assert torch.equal(after[0], before[0])  # position 0 turns nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_equals_reference(native: None, dtype: torch.dtype) -> None:
    q, k, table = torch.randn(40, 9, 24).to(dtype), torch.randn(40, 3, 24).to(dtype), _table(24)
    positions = torch.randint(300, (40,), dtype=torch.int32)
    expected_q, expected_k = q.clone(), k.clone()
    rope_reference_(expected_q, expected_k, positions, table)
    kernels.rope_(q, k, positions, table)
    assert torch.equal(q, expected_q)
    assert torch.equal(k, expected_k)


def test_a_row_has_the_same_bits_in_any_batch(implementation: object) -> None:
    q, k, table = torch.randn(257, 9, 20).bfloat16(), torch.randn(257, 3, 20).bfloat16(), _table(20)
    positions = torch.randint(300, (257,), dtype=torch.int32)
    whole = q.clone()
    kernels.rope_(whole, k.clone(), positions, table)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (*range(1, 41), 64, 100, 257):
            part = q[-rows:].clone()
            kernels.rope_(part, k[-rows:].clone(), positions[-rows:], table)
            assert torch.equal(part, whole[-rows:])


def test_turns_slices_of_a_fused_projection_in_place(implementation: object) -> None:
    fused, table, positions = torch.randn(5, 100), _table(20), torch.arange(5)
    q, k = fused[:, :40].view(5, 2, 20), fused[:, 40:60].view(5, 1, 20)
    alone_q, alone_k, rest = q.clone(), k.clone(), fused[:, 60:].clone()
    kernels.rope_(alone_q, alone_k, positions, table)
    kernels.rope_(q, k, positions, table)
    assert torch.equal(fused, torch.cat([alone_q.flatten(1), alone_k.flatten(1), rest], dim=1))


@pytest.mark.parametrize("position", [-1, 300])
def test_refuses_positions_outside_the_table(implementation: object, position: int) -> None:
    q, k = torch.randn(2, 2, 20), torch.randn(2, 1, 20)
    before = q.clone()
    with pytest.raises(IndexError):
        kernels.rope_(q, k, torch.tensor([0, position]), _table(20))
    assert torch.equal(q, before)
