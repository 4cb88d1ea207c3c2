"""The Triton operators on a GPU: against the references, and a row's bits against any batch. `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels.attention import rotate_and_attend
from kernels.experts import mix_experts_reference
from kernels.routing import route_reference
from tests.kernels.gpu.cases import AttentionCase, changed, step_start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

#: Largest relative error against a float32 reference.
CLOSE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = list(CLOSE)
ROW_COUNTS = (1, 2, 3, 7, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 255, 256, 511, 1000)

#: (out, in) of the layers of Llama-3.1-8B, Qwen3-0.6B and SmolLM2, an odd one, one whose K is one step of few rows'
#: tiles, two of many rows', routers of 8 and 128 experts, and a head whose rows begin between 16 bytes.
SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (576, 576),
    (1000, 1544),
    (200, 112),
    (8, 4096),
    (128, 2048),
    (5002, 1544),
)
#: Those whose products are also tried with a bias and with float32 results, each a kernel of its own.
FEW_SHAPES = ((4096, 4096), (1024, 2048), (1000, 1544), (200, 112), (8, 4096), (128, 2048), (5002, 1544))

#: A chunk, and single tokens whose contexts end on both sides of tiles, splits and blocks.
STARTS, COUNTS = (0, 5, 700, 255, 0, 90, 511), (1, 1, 1, 1, 70, 33, 2)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: (dtype, heads, KV heads, head_dim, window, soft cap). A kernel each, which is what takes time here.
ATTENTION = (
    *(
        (BF16, heads, 0, 0.0)
        for heads in ((32, 8, 128), (16, 8, 128), (9, 3, 64), (4, 4, 80), (8, 1, 256), (14, 2, 96))
    ),
    *((BF16, heads, 300, 0.0) for heads in ((9, 3, 64), (8, 1, 256))),
    *((BF16, heads, 0, 5.0) for heads in ((9, 3, 64), (8, 1, 256))),
    (F16, (9, 3, 64), 0, 0.0),
    (F16, (4, 4, 80), 300, 5.0),
    (F32, (9, 3, 64), 0, 0.0),
    (F32, (14, 2, 96), 300, 5.0),
    (F32, (8, 1, 256), 0, 0.0),
)
ATTENTION_TO_FP8 = (
    (BF16, (32, 8, 128), 0, 0.0),
    (BF16, (8, 1, 256), 0, 5.0),
    (F16, (4, 4, 80), 300, 0.0),
    (F32, (9, 3, 64), 0, 0.0),
)

GATED_SHAPES = ((28672, 4096), (6144, 1024), (3072, 576))


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    device = torch.device("cuda", 0)
    for dtype in DTYPES:
        kernels.start_gpu(device, dtype)
    return device


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_rms_norm(cuda: torch.device, dtype: torch.dtype, width: int) -> None:
    x, residual = torch.randn(2, 37, width, device=cuda).to(dtype)
    weight = torch.randn(width, device=cuda).to(dtype)
    normed, total = kernels.rms_norm(x, weight, 1e-5, residual)
    wanted, wanted_total = kernels.rms_norm(x.cpu(), weight.cpu(), 1e-5, residual.cpu())
    assert error(normed, wanted) < CLOSE[dtype]
    assert torch.equal(total.cpu(), wanted_total)
    for count in (1, 5, 36):
        assert torch.equal(kernels.rms_norm(x[:count], weight, 1e-5, residual[:count])[0], normed[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(cuda: torch.device, dtype: torch.dtype) -> None:
    x = (torch.randn(9, 600, device=cuda) * 4).to(dtype)
    for operator in (kernels.silu_and_mul, kernels.gelu_and_mul):
        assert error(operator(x), operator(x.cpu())) < CLOSE[dtype]


def test_soft_cap(cuda: torch.device) -> None:
    x = torch.randn(7, 5001, device=cuda) * 20
    whole = x.clone()
    kernels.soft_cap_(whole, 30.0)
    torch.testing.assert_close(whole.double(), 30 * torch.tanh(x.double() / 30), rtol=0, atol=2e-5)
    for rows in (1, 3):
        some = x[-rows:].clone()
        kernels.soft_cap_(some, 30.0)
        assert torch.equal(some, whole[-rows:])


def test_embeddings(cuda: torch.device) -> None:
    weight = torch.randn(100, 48, device=cuda)
    last = torch.tensor([5, 99, 7], dtype=torch.int32, device=cuda)
    ids = torch.tensor([3, -1, -3, 0, -2], dtype=torch.int32, device=cuda)
    for num_changes in (0, 5, 4000):
        start = step_start(last, num_changes)
        wanted = changed(start)
        found = kernels.embed_ahead(ids, start, weight, torch.bfloat16)
        assert torch.equal(found, weight[[3, 5, 7, 0, 99]].bfloat16())
        assert torch.equal(start.cells, wanted)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((BF16, shape) for shape in SHAPES), *((dtype, shape) for dtype in (F16, F32) for shape in SHAPES[-5:-3])],
    ids=str,
)
def test_invariance_of_products(cuda: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Right, and the same for a row in any batch."""
    wrong = []
    num_out, num_in = shape
    weight, x = (torch.randn(rows, num_in, device=cuda).to(dtype) for rows in (num_out, 1000))
    packed = kernels.pack_linear(weight)
    bias = torch.randn(num_out, device=cuda)
    kinds = [(None, None), *([(torch.float32, None), (None, bias)] if shape in FEW_SHAPES else [])]
    for out_dtype, add in kinds:
        whole = kernels.linear(x, packed, add, out_dtype=out_dtype)
        wanted = x[:64].double() @ weight.double().t() + (0 if add is None else add.double())
        assert error(whole[:64], wanted) < CLOSE[dtype]
        for rows in ROW_COUNTS:
            if not torch.equal(kernels.linear(x[-rows:], packed, add, out_dtype=out_dtype), whole[-rows:]):
                wrong.append((rows, out_dtype, add is not None))
    assert wrong == []


@pytest.mark.parametrize(
    ("dtype", "shape", "kind"),
    [
        *((BF16, shape, kernels.Activation.SILU) for shape in GATED_SHAPES),
        (BF16, GATED_SHAPES[-1], kernels.Activation.GELU_TANH),
        (F32, GATED_SHAPES[-1], kernels.Activation.SILU),
        (F16, (224, 112), kernels.Activation.SILU),
    ],
    ids=str,
)
def test_invariance_of_gated_products(
    cuda: torch.device, dtype: torch.dtype, shape: tuple[int, int], kind: kernels.Activation
) -> None:
    """The bits of their parts, in any batch."""
    num_out, num_in = shape
    operator = kernels.silu_and_mul if kind is kernels.Activation.SILU else kernels.gelu_and_mul
    weight, x = (torch.randn(rows, num_in, device=cuda).to(dtype) for rows in (num_out, 1000))
    packed = kernels.pack_linear(weight * 0.05)
    bias = torch.randn(num_out, device=cuda) if num_in == 112 else None
    whole = operator(kernels.linear(x, packed, bias))
    wrong = [
        rows
        for rows in ROW_COUNTS
        if not torch.equal(kernels.gated_linear(x[-rows:], packed, bias, kind), whole[-rows:])
    ]
    assert wrong == []


@pytest.mark.parametrize(("num_out", "num_in"), [(4096, 1024), (4096, 2048), (1000, 1544)])
def test_invariance_of_products_after_a_norm(cuda: torch.device, num_out: int, num_in: int) -> None:
    """A row alone is normed in the product, where the weight is small."""
    x, weight = (torch.randn(rows, num_in, device=cuda).to(BF16) for rows in (300, num_out))
    packed = kernels.pack_linear(weight / 32)
    norm = kernels.RowNorm((1 + torch.randn(num_in, device=cuda) / 8).to(BF16), 1e-6)
    normed, _ = kernels.rms_norm(x, norm.weight, norm.eps)
    whole, whole_gated = kernels.linear(normed, packed), kernels.gated_linear(normed, packed)
    for first, last in (*((row, row + 1) for row in range(0, 300, 7)), (0, 5)):
        assert torch.equal(kernels.normed_linear(x[first:last], norm, packed), whole[first:last])
        assert torch.equal(kernels.normed_gated_linear(x[first:last], norm, packed), whole_gated[first:last])


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(BF16, (8, 4096, 1792, 2)), (BF16, (128, 2048, 768, 8)), *((dtype, (5, 200, 48, 3)) for dtype in DTYPES)],
    ids=str,
)
def test_invariance_of_experts(cuda: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """One expert is liked by all rows, so that it has one row or all of a call's."""
    count, hidden, inner, top_k = sizes
    packed = kernels.empty_experts(count, hidden, inner, dtype=dtype, device=cuda)
    for expert in range(count):
        gate, up = (torch.randn(2, inner, hidden, device=cuda) / hidden**0.5).to(dtype)
        packed.fill(expert, gate, up, (torch.randn(hidden, inner, device=cuda) / inner**0.5).to(dtype))
    x, logits = torch.randn(600, hidden, device=cuda).to(dtype), torch.randn(600, count, device=cuda)
    logits[:, 3] += 5
    chosen, weights = kernels.route(logits, top_k, renormalize=True)
    wanted_chosen, wanted_weights = route_reference(logits.cpu(), top_k, renormalize=True)
    assert torch.equal(chosen.cpu(), wanted_chosen)
    torch.testing.assert_close(weights.cpu(), wanted_weights, rtol=1e-5, atol=0)
    whole = kernels.mix_experts(x, chosen, weights, packed)
    few = slice(-20, None)
    wanted = mix_experts_reference(
        x[few].float().cpu(),
        *(chosen[few].cpu(), weights[few].cpu(), packed.gate_up.float().cpu(), packed.down.float().cpu()),
    )
    assert error(whole[few], wanted) < CLOSE[dtype]
    wrong = []
    for rows in ROW_COUNTS[:-1]:
        part = slice(-rows, None)
        alone = kernels.route(logits[part].contiguous(), top_k, renormalize=True)
        assert torch.equal(alone[1], weights[part])
        if not torch.equal(kernels.mix_experts(x[part], *alone, packed), whole[part]):
            wrong.append(rows)
    assert wrong == []


@pytest.mark.parametrize(("dtype", "heads", "window", "soft_cap"), ATTENTION, ids=str)
def test_attention_of_a_mixed_batch(
    cuda: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], window: int, soft_cap: float
) -> None:
    case = AttentionCase.draw(*heads, dtype=dtype, block_size=32, starts=STARTS, counts=COUNTS)
    found = case.on(cuda).run(window, soft_cap)
    wanted = rotate_and_attend(
        *(case.qkv.float(), case.table, case.keys.float(), case.values.float(), case.batch, case.slots),
        num_heads=heads[0],
        scale=heads[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
    )
    assert error(found, wanted) < CLOSE[dtype] * 1.5


@pytest.mark.parametrize(("dtype", "heads", "window", "soft_cap"), ATTENTION_TO_FP8, ids=str)
def test_attention_to_an_fp8_pool(
    cuda: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], window: int, soft_cap: float
) -> None:
    """Scales that are no powers of two; that of values cuts the largest."""
    scales = kernels.KVScales(0.013, 0.0071)
    case = AttentionCase.draw(*heads, dtype=dtype, block_size=32, starts=STARTS, counts=COUNTS).with_fp8(scales)
    on_gpu = case.on(cuda)
    found = on_gpu.run(window, soft_cap)
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=heads[0],
        scale=heads[2] ** -0.5,
        window=window,
        soft_cap=soft_cap,
        scales=scales,
    )
    assert torch.equal(on_gpu.values.cpu().view(torch.uint8), case.values.view(torch.uint8))
    keys = on_gpu.keys.cpu().contiguous().view(torch.uint8)
    differ = int((keys != case.keys.view(torch.uint8)).sum())  # a turned key may round otherwise
    assert differ <= (3 if dtype is F32 else keys.numel() // 1000)
    assert error(found, wanted) < max(CLOSE[dtype] * 1.5, 1e-4)


@pytest.mark.parametrize(
    ("dtype", "heads", "fp8"),
    [
        *((BF16, heads, False) for heads in ((32, 8, 128), (9, 3, 64), (8, 1, 256))),
        (F32, (9, 3, 64), False),
        *((BF16, heads, True) for heads in ((32, 8, 128), (8, 1, 256))),
        (F16, (9, 3, 64), True),
        (F32, (9, 3, 64), True),
    ],
    ids=str,
)
def test_invariance_of_attention(
    cuda: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk of 700 tokens, chunks cut elsewhere, and single tokens with splits spread in several ways; for all
    shapes but one after norms of heads."""
    from kernels.gpu import decode

    case = AttentionCase.draw(*heads, dtype=dtype, block_size=16, starts=(0,), counts=(700,))
    if heads != (32, 8, 128):
        query, key = (1 + torch.randn(2, heads[2], device=cuda) / 8).to(dtype)
        case = replace(case, norms=kernels.HeadNorms(query, key, 1e-6))
    whole = (case.with_fp8(kernels.KVScales(0.013, 0.0071)) if fp8 else case).on(cuda)
    wanted = whole.run(0, 0.0)
    for cuts in ((0, 1, 38, 338, 700), (0, 256, 257, 700)):
        assert torch.equal(whole.in_chunks(cuts), wanted)
    monkeypatch.setattr(decode, "_LONG_SPLITS", 1)
    for spread in (
        *(decode.Spread(1, 2, 3, walk=True), decode.Spread(1, 4, 5, walk=True), decode.Spread(2, 2, 3, walk=True)),
        *(decode.Spread(2, 2, 5), decode.Spread(3, 4, 3), decode.Spread(3, 2, 3, walk=True)),
        *(decode.Spread(2, 4, 3, early=True), decode.Spread(3, 8, 5, early=True)),
    ):
        monkeypatch.setattr(decode, "choose_spread", lambda *a, spread=spread, **k: spread)
        for at in (0, 63, 64, 255, 256, 300, 511, 512, 640, 699):
            assert torch.equal(whole.row_alone(at), wanted[at : at + 1]), (spread, at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 256)], ids=str)
@pytest.mark.parametrize("window", [0, 300])
def test_short_chunks_have_the_bits_of_long_ones(
    cuda: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], window: int
) -> None:
    """Walked by one program, shared by some, and by one each split; so have last tokens alone."""
    starts, counts = (2300, 5, 0, 700, 255), (1, 1, 70, 33, 2)
    case = AttentionCase.draw(*heads, dtype=dtype, block_size=16, starts=starts, counts=counts)
    case = replace(case, table=case.table.repeat(3, 1)).on(cuda)
    wanted = case.run(window, 0.0)
    for spare in (0, 3, 12, 100):
        shared = case.in_items(spare)
        assert torch.equal(shared.run(window, 0.0), wanted), spare
        last, rows = case.of_last_tokens(spare)
        assert torch.equal(last.run(window, 0.0)[rows], wanted[rows]), spare
        assert shared.batch.schedule is not None
        assert not shared.batch.schedule.arrivals.any()


@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)], ids=str)
@pytest.mark.parametrize(("window", "num_items"), [(0, 0), (0, 96), (300, 96)])
def test_padding_waits_for_the_rows_before_it(
    cuda: torch.device, heads: tuple[int, int, int], window: int, num_items: int
) -> None:
    """Items that are all padding end at once; tiles after them must not begin before queries are turned and keys
    written. In a graph, whose kernels follow each other without the host."""
    case = AttentionCase.draw(*heads, dtype=torch.bfloat16, block_size=16, starts=(0, 0), counts=(900, 100)).on(cuda)
    case.keys.zero_()
    wanted, keys = case.run(window, 0.0), case.keys.clone()
    padded = case.padded(96, num_items)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        found += [padded.run(window, 0.0) for _ in range(8)]
    for _ in range(20):
        case.keys.zero_()
        graph.replay()
        assert torch.equal(case.keys, keys)
        assert all(torch.equal(out, wanted) for out in found)
        assert padded.batch.schedule is not None
        assert not padded.batch.schedule.arrivals.any()
