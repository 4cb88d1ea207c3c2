from collections.abc import Callable

import pytest
import torch

import kernels
from kernels.activation import gelu_and_mul_reference, silu_and_mul_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 20, 100, 1536])
def test_follows_the_definition(implementation: object, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * width) * 4).to(dtype)
    gate, up = x[:, :width].double(), x[:, width:].double()
    y = kernels.silu_and_mul(x)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), gate * torch.sigmoid(gate) * up, rtol=2.5 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 20, 100])
def test_gelu_is_the_form_with_tanh(implementation: object, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 2 * width) * 4).to(dtype)
    gate, up = x[:, :width].double(), x[:, width:].double()
    y = kernels.gelu_and_mul(x)
    assert y.dtype == dtype
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(y.double(), exact, rtol=2.5 * torch.finfo(dtype).eps, atol=2e-6)


def test_native_and_reference_agree(native: None) -> None:
    x = torch.randn(9, 200) * 10
    torch.testing.assert_close(kernels.silu_and_mul(x), silu_and_mul_reference(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kernels.gelu_and_mul(x), gelu_and_mul_reference(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operator", ["silu_and_mul", "gelu_and_mul"])
def test_far_values_neither_overflow_nor_vanish_wrongly(implementation: object, operator: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -80.0, 0.0, 100.0, 1e4, torch.nan, torch.inf] + [1.0] * 8])
    y = getattr(kernels, operator)(x)[0]
    torch.testing.assert_close(y[:6], torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e4]), rtol=0, atol=1e-30)
    assert torch.isnan(y[6])
    assert y[7] == torch.inf


@pytest.mark.parametrize("operator", [kernels.silu_and_mul, kernels.gelu_and_mul])
def test_a_row_has_the_same_bits_in_any_batch(
    implementation: object, operator: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for dtype in DTYPES:
        x = torch.randn(257, 2 * 100).to(dtype)
        whole = operator(x)
        for threads in (1, 2):
            kernels.set_num_threads(threads)
            for rows in (*range(1, 41), 64, 100, 257):
                assert torch.equal(operator(x[-rows:]), whole[-rows:]), (dtype, threads, rows)


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_soft_cap_is_a_scaled_tanh(implementation: object, cap: float) -> None:
    x = torch.randn(7, 1001) * 20
    y = x.clone()
    kernels.soft_cap_(y, cap)
    torch.testing.assert_close(y.double(), cap * torch.tanh(x.double() / cap), rtol=0, atol=4e-7 * cap)
    ends = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30, 0.0, torch.nan])
    kernels.soft_cap_(ends, cap)
    assert ends[:5].tolist() == [cap, -cap, cap, -cap, 0.0]
    assert torch.isnan(ends[5])


def test_soft_cap_has_the_same_bits_in_any_batch(implementation: object) -> None:
    x = torch.randn(40, 1237) * 20
    whole = x.clone()
    kernels.soft_cap_(whole, 30.0)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (1, 2, 3, 17, 40):
            some = x[-rows:].clone()
            kernels.soft_cap_(some, 30.0)
            assert torch.equal(some, whole[-rows:]), (threads, rows)
