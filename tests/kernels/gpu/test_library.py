"""Which products the library makes by an algorithm of ours, and their bits."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from kernels.gpu import cublaslt, library, matmul, start
from kernels.gpu.launch import Limits

H200 = Limits(num_sms=132, shared_memory=227 << 10, dependent=True)
BF16 = torch.bfloat16


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "limits", lambda device: H200)
    monkeypatch.setattr(library, "_allowed", {BF16: library.Allowed(True, library.ALGORITHMS)})


def columns(num_rows: int, num_out: int) -> int | None:
    found = library.fitting(torch.empty(num_rows, 8, dtype=BF16, device="meta"), num_out)
    return None if found is None else found.columns


def goes_to_library(shape: tuple[int, int], out_dtype: torch.dtype) -> bool:
    x = Mock(torch.Tensor, shape=(300, shape[1]), dtype=BF16, is_cuda=True)
    x.element_size.return_value = 2
    weight = torch.empty(shape, device="meta")
    return matmul.choose_tile(x, weight, has_bias=False, gated=False, out_dtype=out_dtype) is None


def test_fill() -> None:
    """256 rows by 28672: 2 x 128 programs of 224 columns, two to each of 132 processors but for 8."""
    assert library.ALGORITHMS[1].fill(256, 28672, 132) == pytest.approx(128 / 132)
    assert library.ALGORITHMS[1].fill(250, 28672, 132) == pytest.approx(128 / 132 * 250 / 256)
    assert library.ALGORITHMS[0].fill(129, 177, 132) == pytest.approx(129 * 177 / (132 * 128 * 176))


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("num_rows", "num_out", "wanted"),
    [
        *((80, 28672, None), (128, 28672, 224), (160, 28672, None), (256, 28672, 224), (1024, 28672, 176)),
        *((16384, 28672, 176), (4096, 6144, None), (8192, 6144, 176), (16384, 4096, None)),
    ],
)
def test_an_algorithm_of_ours_keeps_all_processors_busy(num_rows: int, num_out: int, wanted: int | None) -> None:
    assert columns(num_rows, num_out) == wanted


def test_nothing_is_allowed_before_a_start_has_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_allowed", {})
    assert columns(256, 28672) is None
    assert not library.gives_float32(BF16)


@pytest.mark.usefixtures("allowed")
def test_without_a_gpu_products_stay_with_the_tiles() -> None:
    x, weight = torch.empty(200, 64, dtype=BF16), torch.empty(128, 64, dtype=BF16)
    assert matmul.choose_tile(x, weight, has_bias=False, gated=False, out_dtype=torch.float32) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("algorithm", library.ALGORITHMS, ids=lambda algorithm: f"{algorithm.columns} columns")
def test_bits_are_those_of_torch(algorithm: cublaslt.Algorithm, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    if cublaslt.load(device) is None:
        pytest.skip("no Hopper GPU, or another release of cuBLASLt than that of the algorithms")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    for num_out, num_in in ((28672, 4096), (6144, 4096), (4096, 14336), (1000, 1544)):
        x, weight = (torch.randn(rows, num_in, device=device).to(dtype) for rows in (1000, num_out))
        for rows in (1, 65, 127, 128, 129, 256, 300, 1000):
            found = library.multiply_by(algorithm, x[-rows:], weight)
            assert found is not None
            assert torch.equal(found, torch.mm(x[-rows:], weight.t())), (num_out, num_in, rows)


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("shape", "to_library"), [((128, 2048), False), ((8, 4096), False), ((6144, 4096), False), ((32000, 4096), True)]
)
def test_of_float32_results_heads_alone_are_the_librarys(shape: tuple[int, int], to_library: bool) -> None:
    """Not those of routers: nothing has looked at their bits."""
    assert goes_to_library(shape, torch.float32) == to_library


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("shape", "dtype", "to_library"),
    [
        *(((width, 4096), torch.float32, width % 8 == 0) for width in (32000, 32003, 50257, 50260, 50264)),
        *(((width, 4096), BF16, width % 8 == 0) for width in (5000, 5004)),
        *(((32000, 4100), dtype, False) for dtype in (torch.float32, BF16)),
        ((32000, 1544), torch.float32, False),  # not whole steps of K: seen to have other bits
        ((32000, 1536), torch.float32, True),
    ],
)
def test_rows_that_begin_between_16_bytes_stay_with_the_tiles(
    shape: tuple[int, int], dtype: torch.dtype, to_library: bool
) -> None:
    assert goes_to_library(shape, dtype) == to_library


def test_a_start_allows_what_has_equal_bits_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not float32 results of which one kind is otherwise, nor an algorithm with another sum for odd K."""
    products = [start._Products.draw(torch.device("cpu"), BF16, *shape) for shape in ((24, 64), (40, 72))]

    def linear(x: Tensor, weight: Tensor, bias: None, dtype: torch.dtype) -> Tensor:
        return (x.float() @ weight.float().t()).to(dtype)

    def by(algorithm: cublaslt.Algorithm, x: Tensor, weight: Tensor) -> Tensor:
        odd = algorithm is library.ALGORITHMS[1] and x.shape[1] % 64
        return linear(x, weight, None, BF16) * (1.5 if odd else 1.0)

    monkeypatch.setattr(start, "linear", linear)
    monkeypatch.setattr(library, "multiply_by", by)
    monkeypatch.setattr(library, "multiply", lambda x, weight, dtype: linear(x, weight, None, dtype))
    assert start._allowed(products, products[1]) == library.Allowed(True, library.ALGORITHMS[:1])
    monkeypatch.setattr(
        library,
        "multiply",
        lambda x, weight, dtype: linear(x, weight, None, dtype) + (len(x) == 200) * (len(weight) == 40),
    )
    assert not start._allowed(products, products[1]).float32_results
    assert start._allowed(products, products[0]).float32_results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_all_of_it_is_allowed_where_it_is_known(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    if cublaslt.load(device) is None:
        pytest.skip("no Hopper GPU, or another release of cuBLASLt than that of the algorithms")
    start.start_gpu(device, dtype)
    assert library._allowed[dtype] == library.Allowed(True, library.ALGORITHMS)


@pytest.mark.gpu
def test_more_shapes_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    bound = cublaslt.load(device)
    if bound is None:
        pytest.skip("no Hopper GPU, or another release of cuBLASLt than that of the algorithms")
    monkeypatch.setattr(cublaslt, "_MOST_PLANS", 3)
    bound._forget_plans()
    x, weight = torch.randn(300, 64, device=device).to(BF16), torch.randn(176, 64, device=device).to(BF16)
    for rows in (300, 299, 298, 297, 300, 299, 297):
        assert torch.equal(bound.multiply(x[:rows], weight, library.ALGORITHMS[0]), x[:rows] @ weight.t()), rows
        assert len(bound._plans) <= 3


@pytest.mark.gpu
def test_what_does_not_fit_is_left_to_torch() -> None:
    device = torch.device("cuda", 0)
    bound = cublaslt.load(device)
    if bound is None:
        pytest.skip("no Hopper GPU, or another release of cuBLASLt than that of the algorithms")
    x, weight = torch.randn(8, 64, device=device).to(BF16), torch.randn(16, 64, device=device).to(BF16)
    algorithm = library.ALGORITHMS[0]
    assert bound.multiply(x[:, :32], weight[:, :32].contiguous(), algorithm) is None  # rows that are not side by side
    assert bound.multiply(x, weight[:12], algorithm) is None  # 12 columns: rows of the result begin on 8 bytes
    assert bound.multiply(x.float(), weight.float(), algorithm) is None
