import pytest
import torch

import kernels
from kernels.matmul import linear_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: (out, in): whole panels, remainders in both, fewer columns than a panel, one input.
SHAPES = [(96, 64), (100, 331), (7, 20), (33, 1), (576, 576)]
ROW_COUNTS = [*range(1, 41), 64, 100, 257]


def _case(num_out: int, num_in: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_out * 1000 + num_in)
    x = torch.randn(rows, num_in, generator=generator).to(dtype)
    return x, (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype)


@pytest.mark.parametrize("rows", [(16, 32), (7, 1, 40), (33, 15)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_packed_together_are_one_below_the_other(
    implementation: object, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights = [torch.randn(count, 45).to(dtype) for count in rows]
    packed, whole = kernels.pack_linear(*weights), kernels.pack_linear(torch.cat(weights))
    assert packed.shape == whole.shape == (sum(rows), 45)
    assert torch.equal(packed.data, whole.data)
    assert torch.equal(packed.rows(torch.arange(sum(rows))), torch.cat(weights))
    with pytest.raises(ValueError, match=r"one dtype and one number of inputs, got .* with 45 and .* with 44"):
        kernels.pack_linear(weights[0], torch.zeros(3, 44, dtype=dtype))


def test_panels_are_columns_side_by_side(native: None) -> None:
    weight = torch.arange(20 * 70).view(20, 70).half()
    panels = kernels.pack_linear(weight).data
    assert panels.shape == (2, 70, 16)
    assert torch.equal(panels[0], weight[:16].t())
    assert torch.equal(panels[1, :, :4], weight[16:].t())
    assert not panels[1, :, 4:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_product_in_float64(implementation: object, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = _case(*shape, 19, dtype)
    bias = torch.randn(shape[0]).to(dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    packed = kernels.pack_linear(weight)
    wide = kernels.linear(x, packed, bias, out_dtype=torch.float32)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    result = kernels.linear(x, packed, bias)
    assert result.dtype == dtype
    assert torch.equal(result, wide.to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(
    implementation: object, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = _case(*shape, max(ROW_COUNTS), dtype)
    packed = kernels.pack_linear(weight)
    whole = kernels.linear(x, packed)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in ROW_COUNTS:
            assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows]), (threads, rows)
            assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:]), (threads, rows)


def test_an_element_is_one_chain_of_fused_multiply_adds_in_order(native: None) -> None:
    x, weight = _case(5, 300, 3, torch.bfloat16)
    result = kernels.linear(x, kernels.pack_linear(weight), out_dtype=torch.float32)
    chain = torch.zeros(3, 5, dtype=torch.float64)
    for k in range(300):
        # The product of two bfloat16 is exact in float64 and so, here, is the sum: one rounding, as in a fma.
        chain = (chain + torch.outer(x[:, k].double(), weight[:, k].double())).float().double()
    assert torch.equal(result, chain.float())


def test_reads_rows_with_a_stride(implementation: object) -> None:
    x, weight = _case(40, 24, 9, torch.bfloat16)
    packed = kernels.pack_linear(weight)
    padded = torch.cat([x, torch.full((9, 8), torch.nan, dtype=x.dtype)], dim=1)
    assert torch.equal(kernels.linear(padded[:, :24], packed), kernels.linear(x, packed))


def test_no_rows_give_no_rows(implementation: object) -> None:
    _, weight = _case(40, 24, 1, torch.float32)
    assert kernels.linear(torch.empty(0, 24), kernels.pack_linear(weight)).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_out", [32, 39])
def test_rows_of_the_packed_weight_are_those_of_the_weight(
    implementation: object, num_out: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(num_out, 20).to(dtype)
    packed = kernels.pack_linear(weight)
    ids = torch.tensor([0, num_out - 1, 15, 16, 0])
    assert packed.shape == (num_out, 20)
    assert packed.dtype == dtype
    assert torch.equal(packed.rows(ids), weight[ids])
    for wrong in (-1, num_out):
        with pytest.raises(IndexError, match=f"ids must be in 0..{num_out - 1}, got 0..{num_out}|got -1"):
            packed.rows(torch.tensor([0, wrong]))


def test_native_and_reference_agree(native: None) -> None:
    for dtype in DTYPES:
        x, weight = _case(100, 331, 37, dtype)
        ours = kernels.linear(x, kernels.pack_linear(weight), out_dtype=torch.float32)
        torch.testing.assert_close(ours, linear_reference(x, weight.float(), None), rtol=1e-5, atol=1e-5)


def test_not_a_number_and_infinity_stay(implementation: object) -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [3e38, 3e38]])
    y = kernels.linear(x, kernels.pack_linear(torch.tensor([[2.0, 2.0]])), out_dtype=torch.bfloat16)
    assert torch.isnan(y[0, 0])
    assert y[1, 0] == torch.inf
    assert y[2, 0] == torch.inf


def test_refuses_what_it_cannot_multiply(implementation: object) -> None:
    with pytest.raises(ValueError, match=r"must be float32, bfloat16 or float16 of shape \[out, in\], got torch.int8"):
        kernels.pack_linear(torch.zeros(4, 4, dtype=torch.int8))
    packed = kernels.pack_linear(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"x must be \[rows, 8\] for a weight \(4, 8\), got \(2, 7\)"):
        kernels.linear(torch.zeros(2, 7), packed)


def test_a_weight_belongs_to_the_implementation_that_packed_it(native: None) -> None:
    packed = kernels.pack_linear(torch.zeros(4, 8))
    kernels.start(kernels.Implementation.REFERENCE)
    with pytest.raises(RuntimeError, match="packed for the native operators"):
        kernels.linear(torch.zeros(2, 8), packed)
