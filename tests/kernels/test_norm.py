import pytest
import torch

import kernels
from kernels.norm import rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 5, 16, 24, 64, 100, 576]


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_follows_the_definition(implementation: object, width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, width).to(dtype), torch.randn(7, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    for given in (None, residual):
        y, total = kernels.rms_norm(x, weight, 1e-5, given)
        expected_total = x if given is None else x + given
        wide = expected_total.double()
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        assert torch.equal(total, expected_total)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), weight.double() * exact, rtol=2 * _tolerance(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 576])
def test_a_row_has_the_same_bits_in_any_batch(implementation: object, width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(257, width).to(dtype), torch.randn(257, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    whole, _ = kernels.rms_norm(x, weight, 1e-5, residual)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (*range(1, 41), 64, 100, 257):
            y, _ = kernels.rms_norm(x[-rows:], weight, 1e-5, residual[-rows:])
            assert torch.equal(y, whole[-rows:]), (threads, rows)


def test_native_and_reference_agree(native: None) -> None:
    x, weight = torch.randn(9, 576), torch.randn(576)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-6)[0], rms_norm_reference(x, weight, 1e-6, None)[0], rtol=1e-6, atol=1e-6
    )


def test_reads_rows_with_a_stride(implementation: object) -> None:
    fused, weight = torch.randn(6, 50), torch.randn(20)
    x, residual = fused[:, :20], fused[:, 30:]
    expected = kernels.rms_norm(x.contiguous(), weight, 1e-5, residual.contiguous())
    for got, wanted in zip(kernels.rms_norm(x, weight, 1e-5, residual), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float32_weight_scales_before_the_one_rounding(implementation: object, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 100).to(dtype), 1.0 + 0.1 * torch.randn(100)
    y, _ = kernels.rms_norm(x, weight, 1e-5)
    exact = weight.double() * x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=_tolerance(dtype) / 2 + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_heads_are_normed_each_as_a_row_of_its_own(implementation: object, head_dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(6, 5 * head_dim).to(dtype)
    before = fused.clone()
    for weight in (torch.randn(head_dim), torch.randn(head_dim).to(dtype)):
        heads = fused.view(6, 5, head_dim)[:, 1:4]
        rows = heads.reshape(-1, head_dim).clone()
        kernels.head_norm_(heads, weight, 1e-6)
        assert torch.equal(heads.reshape(-1, head_dim), kernels.rms_norm(rows, weight, 1e-6)[0])
    untouched = [0, 4]
    assert torch.equal(fused.view(6, 5, head_dim)[:, untouched], before.view(6, 5, head_dim)[:, untouched])
