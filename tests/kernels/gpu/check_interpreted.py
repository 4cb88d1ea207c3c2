"""The Triton operators against the references in Triton's interpreter; `test_interpreted` runs this file.

A process of its own, because Triton decides at import whether it interprets. Not bfloat16, which the
interpreter keeps as integers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels.activation import gelu_and_mul_reference, silu_and_mul_reference
from kernels.attention import rotate_and_attend
from kernels.experts import mix_experts_reference
from kernels.gate import Activation
from kernels.gpu import (
    activation,
    decode,
    embedding,
    experts,
    logprobs,
    matmul,
    mode,
    norm,
    products,
    routing,
    vector,
)
from kernels.norm import rms_norm_reference
from kernels.routing import route_reference
from tests.kernels.gpu.cases import AttentionCase, changed, step_start

pytest_plugins = ("tests.kernels.gpu.interpreting",)

# Idle rows of a tile divide 0 by 0, and are not stored.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.timeout(300)]

CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3}
DTYPES = list(CLOSE)
SPREADS = {
    "walk": decode.Spread(1, 4, 1, walk=True),
    "long": decode.Spread(2, 4, 1, walk=True),
    "spread": decode.Spread(2, 4, 1),
    "early": decode.Spread(2, 4, 1, early=True),
}
REFERENCES = {Activation.SILU: silu_and_mul_reference, Activation.GELU_TANH: gelu_and_mul_reference}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 100).to(dtype), torch.randn(5, 100).to(dtype), torch.randn(100).to(dtype)
    for add in (residual, None):
        normed, total = norm.rms_norm(x, weight, 1e-5, add)
        wanted, wanted_total = rms_norm_reference(x, weight, 1e-5, add)
        assert error(normed, wanted) < CLOSE[dtype]
        assert torch.equal(total, wanted_total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_by_a_float32_weight(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 100).to(dtype), torch.randn(100)
    assert error(norm.rms_norm(x, weight, 1e-5, None)[0], rms_norm_reference(x, weight, 1e-5, None)[0]) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations_of_a_view(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 250) * 3).to(dtype)[:, :200]
    for kind, reference in REFERENCES.items():
        assert error(activation.activate_and_mul(x, kind), reference(x)) < CLOSE[dtype]


def test_soft_cap() -> None:
    x = torch.randn(3, 1000) * 20
    found = x.clone()
    activation.soft_cap_(found, 30.0)
    torch.testing.assert_close(found.double(), 30 * torch.tanh(x.double() / 30), rtol=0, atol=1e-5)


def test_embeddings() -> None:
    weight = torch.randn(9, 12)
    ids, last = torch.tensor([3, -1, -2], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    for num_changes in (0, 5, 1200):
        start = step_start(last, num_changes)
        wanted = changed(start)
        assert torch.equal(embedding.embed_ahead(ids, start, weight, torch.float16), weight[[3, 5, 8]].half())
        assert torch.equal(start.cells, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 17, 40, 70])
def test_products(dtype: torch.dtype, rows: int) -> None:
    for num_out, num_in in ((100, 72), (128, 128)):
        x, weight, bias = (
            torch.randn(rows, num_in).to(dtype),
            torch.randn(num_out, num_in).to(dtype),
            torch.randn(num_out),
        )
        wanted = x.double() @ weight.double().t()
        found = matmul.linear(x, weight, None, torch.float32), matmul.linear(x, weight, bias, dtype)
        assert found[0].shape == found[1].shape == wanted.shape
        if rows:
            assert error(found[0], wanted) < 1e-6
            assert error(found[1], wanted + bias) < CLOSE[dtype]
            for kind, reference in REFERENCES.items():
                gated = reference((wanted + bias).to(dtype))
                assert error(matmul.gated_linear(x, weight, bias, kind), gated) < CLOSE[dtype]


@pytest.mark.parametrize(("num_in", "rows"), [(1024, 1), (1024, 5), (2048, 8), (3072, 1)])
def test_products_of_few_rows_by_small_weights(num_in: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "choose_tile", None)  # no product is left to the tiles
    x, weight, bias = torch.randn(rows, num_in).half(), (torch.randn(40, num_in) / 32).half(), torch.randn(40)
    residual = torch.randn(rows, 40).half()
    wanted = x.double() @ weight.double().t()
    assert error(products.linear(x, weight, None, torch.float32), wanted) < 1e-6
    rounded = (wanted + bias).half()
    added = products.add_linear(x, weight, bias, residual)
    assert added is not None
    assert error(added, rounded.double() + residual.double()) < CLOSE[torch.float16]
    for kind, reference in REFERENCES.items():
        assert error(products.gated_linear(x, weight, bias, kind), reference(rounded)) < CLOSE[torch.float16]


@pytest.mark.parametrize("num_in", [1024, 72])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_normed_rows_have_the_bits_of_their_parts(num_in: int, rows: int) -> None:
    """In a kernel of their own for a single row of 1024."""
    x, weight, bias = torch.randn(rows, num_in).half(), (torch.randn(40, num_in) / 32).half(), torch.randn(40)
    row_norm = kernels.RowNorm(1 + torch.randn(num_in).half() / 8, 1e-6)
    normed, _ = norm.rms_norm(x, row_norm.weight, row_norm.eps, None)
    found = products.normed_linear(x, row_norm, weight, bias)
    assert torch.equal(found, products.linear(normed, weight, bias, torch.float16))
    found = products.normed_gated_linear(x, row_norm, weight, bias, Activation.GELU_TANH)
    assert torch.equal(found, products.gated_linear(normed, weight, bias, Activation.GELU_TANH))


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "_chosen", mode.FASTEST)
    monkeypatch.setattr(vector, "LEAST_OUT", 1)


@pytest.mark.parametrize(("num_out", "num_in"), [(100, 72), (20, 4096)])
def test_products_of_a_single_row_as_sums(
    num_out: int, num_in: int, fastest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "choose_tile", None)  # no product is left to the tiles
    x, weight = torch.randn(1, num_in).half(), (torch.randn(num_out, num_in) / 8).half()
    bias, residual = torch.randn(num_out), torch.randn(1, num_out).half()
    wanted = x.double() @ weight.double().t()
    assert error(products.linear(x, weight, None, torch.float32), wanted) < 1e-6
    rounded = (wanted + bias).half()
    assert error(products.linear(x, weight, bias, torch.float16), rounded) < CLOSE[torch.float16]
    added = products.add_linear(x, weight, bias, residual)
    assert added is not None
    assert error(added, rounded.double() + residual.double()) < CLOSE[torch.float16]
    for kind, reference in REFERENCES.items():
        assert error(products.gated_linear(x, weight, bias, kind), reference(rounded)) < CLOSE[torch.float16]


def test_more_rows_go_to_the_tiles_in_any_mode(fastest: None) -> None:
    x, weight = torch.randn(2, 72).half(), torch.randn(100, 72).half()
    assert torch.equal(products.linear(x, weight, None, torch.float16), matmul.linear(x, weight, None, torch.float16))


@pytest.mark.parametrize("renormalize", [False, True])
def test_routes(renormalize: bool) -> None:
    logits = torch.randn(9, 20)
    logits[1], logits[2], logits[3, 3] = 1.0, logits[2].round(), torch.nan
    logits[4] = -torch.inf
    logits[4, 7] = 0.0
    chosen, weights = routing.route(logits, 5, renormalize=renormalize)
    wanted, wanted_weights = route_reference(logits, 5, renormalize=renormalize)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 17, 70])
def test_experts(dtype: torch.dtype, rows: int) -> None:
    """Of seven, the last is chosen by none. 70 rows of one expert are two tiles."""
    x, gate_up, down = torch.randn(rows, 72), torch.randn(7, 40, 72) / 8, torch.randn(7, 72, 20) / 4
    logits = torch.randn(rows, 7)
    logits[:, 6], logits[:, 2] = -9.0, 9.0
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    route = route_reference(logits, 3, renormalize=True)
    found = experts.mix_experts(x, *route, gate_up, down)
    wanted = mix_experts_reference(x, *route, gate_up.float(), down.float())
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    assert rows == 0 or error(found, wanted) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 2.0)])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_attention(
    dtype: torch.dtype, window: int, soft_cap: float, spread: decode.Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "choose_spread", lambda *sizes, **options: spread)
    monkeypatch.setattr(decode, "_LONG_SPLITS", 1)
    case = AttentionCase.draw(3, 1, 80, dtype=dtype, block_size=32, starts=(0, 600, 250), counts=(1, 1, 20))
    copied = case.on(torch.device("cpu"))
    found = copied.run(window, soft_cap)
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=3,
        scale=80**-0.5,
        window=window,
        soft_cap=soft_cap,
    )
    assert error(found, wanted) < CLOSE[dtype]
    assert torch.equal(copied.values, case.values)
    assert error(copied.keys, case.keys) < CLOSE[dtype]
    assert copied.batch.schedule is not None
    assert not copied.batch.schedule.arrivals.any()


@pytest.mark.parametrize("spare", [0, 4, 9], ids=["walk", "shared by some", "a split each"])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (300, 0.0), (0, 5.0)])
def test_attention_of_short_chunks(spare: int, window: int, soft_cap: float) -> None:
    case = AttentionCase.draw(*(6, 3, 48), dtype=torch.float16, block_size=32, starts=(20, 600, 0), counts=(1, 40, 3))
    copied = case.on(torch.device("cpu")).in_items(spare)
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=6,
        scale=48**-0.5,
        window=window,
        soft_cap=soft_cap,
    )
    assert error(copied.run(window, soft_cap), wanted) < CLOSE[torch.float16]
    schedule = copied.batch.schedule
    assert schedule is not None
    assert len(schedule.items) >= 4
    assert bool((schedule.items[:, 3] > 1).any()) == (spare > 0)
    assert not schedule.arrivals.any()


def test_attention_beside_padding() -> None:
    """Of tiles, with no item that is not padding; and of items, with no such tile."""
    case = AttentionCase.draw(*(6, 3, 48), dtype=torch.float16, block_size=32, starts=(20, 280), counts=(1, 40))
    wanted = case.on(torch.device("cpu")).run(0, 0.0)
    for copied in (case.on(torch.device("cpu")), case.on(torch.device("cpu")).in_items(2)):
        padded = copied.padded(3, 3)
        assert torch.equal(padded.run(0, 0.0), copied.run(0, 0.0))
        assert error(padded.run(0, 0.0), wanted) < CLOSE[torch.float16]


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 2.0)])
@pytest.mark.parametrize("in_items", [False, True], ids=["tiles", "items"])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_attention_in_a_graph_for_more_single_tokens(
    window: int, soft_cap: float, in_items: bool, spread: decode.Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of chunks stand where these would; behind tiles and items comes padding."""
    monkeypatch.setattr(decode, "choose_spread", lambda *sizes, **options: spread)
    monkeypatch.setattr(decode, "_LONG_SPLITS", 1)
    sizes = {"dtype": torch.float16, "block_size": 32, "starts": (600, 20, 280), "counts": (1, 1, 40)}
    case, room = (AttentionCase.draw(6, 3, 48, **sizes).on(torch.device("cpu")) for _ in range(2))
    if in_items:
        case, room = case.in_items(2), room.in_items(2)
    room = room.with_room(7).padded(2, 2)
    assert torch.equal(room.run(window, soft_cap), case.run(window, soft_cap))
    assert torch.equal(room.keys, case.keys)
    assert torch.equal(room.values, case.values)
    schedule = room.batch.schedule
    assert schedule is not None
    assert not schedule.arrivals.any()


@pytest.mark.parametrize("spare", [0, 4])
def test_attention_of_last_tokens_alone(spare: int) -> None:
    """Keys and values are written for all tokens."""
    case = AttentionCase.draw(*(6, 3, 48), dtype=torch.float16, block_size=32, starts=(20, 600, 0), counts=(1, 40, 30))
    copied = case.on(torch.device("cpu"))
    last, rows = copied.of_last_tokens(spare)
    assert rows.tolist() == [0, 40, 70]
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots), num_heads=6, scale=48**-0.5
    )
    assert error(last.run(0, 0.0)[rows], wanted[rows]) < CLOSE[torch.float16]
    assert torch.equal(last.values, case.values)
    assert error(last.keys, case.keys) < CLOSE[torch.float16]


@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_chunks_in_one_split(window: int, fastest: None) -> None:
    dtype = torch.float32
    case = AttentionCase.draw(3, 1, 64, dtype=dtype, block_size=32, starts=(0, 900, 570), counts=(1, 1, 20))
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=3,
        scale=64**-0.5,
        window=window,
    )
    assert error(case.on(torch.device("cpu")).run(window, 0.0), wanted) < CLOSE[dtype]


def test_attention_that_turns_a_part_of_each_head() -> None:
    """36 of 48 dimensions, for a single token and for a chunk."""
    whole = AttentionCase.draw(6, 3, 48, dtype=torch.float32, block_size=16, starts=(30, 40), counts=(1, 20))
    case = replace(whole, table=torch.cat((whole.table[:, :18], whole.table[:, 24:42]), 1))
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=6,
        scale=48**-0.5,
    )
    assert error(case.on(torch.device("cpu")).run(0, 0.0), wanted) < CLOSE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_after_norms_of_heads(dtype: torch.dtype) -> None:
    case = AttentionCase.draw(12, 3, 48, dtype=dtype, block_size=16, starts=(0, 40), counts=(1, 20))
    norms = kernels.HeadNorms(torch.randn(48).to(dtype), torch.randn(48).to(dtype), 1e-6)
    copied = replace(case.on(torch.device("cpu")), norms=norms)
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=12,
        scale=48**-0.5,
        norms=norms,
    )
    assert error(copied.run(0, 0.0), wanted) < CLOSE[dtype]
    assert error(copied.keys, case.keys) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_attention_to_an_fp8_pool(dtype: torch.dtype, spread: decode.Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale of values that cuts the largest of them."""
    monkeypatch.setattr(decode, "choose_spread", lambda *sizes, **options: spread)
    monkeypatch.setattr(decode, "_LONG_SPLITS", 1)
    scales = kernels.KVScales(0.02, 0.005)
    case = AttentionCase.draw(3, 1, 80, dtype=dtype, block_size=32, starts=(0, 300, 250), counts=(1, 1, 20))
    case = case.with_fp8(scales)
    copied = case.on(torch.device("cpu"))
    found = copied.run(0, 0.0)
    wanted = rotate_and_attend(
        *(case.qkv.clone(), case.table, case.keys, case.values, case.batch, case.slots),
        num_heads=3,
        scale=80**-0.5,
        scales=scales,
    )
    assert error(found, wanted) < CLOSE[dtype]
    for pool, expected in ((copied.values, case.values), (copied.keys, case.keys)):
        assert int((pool.view(torch.uint8) != expected.view(torch.uint8)).sum()) < 5  # the rotation rounds otherwise


def test_logprobs() -> None:
    logits, ids = torch.randn(4, 300) * 3, torch.tensor([3, 5, 7, 9])
    logits[1] = logits[1].round()
    wanted = kernels.logprobs(logits, ids, 6)
    own, rank, top_ids, top = logprobs.logprobs_ahead(logits, ids.int(), 6)
    torch.testing.assert_close(own, wanted.own, rtol=0, atol=2e-6)
    torch.testing.assert_close(top, wanted.top, rtol=0, atol=2e-6)
    assert rank.tolist() == wanted.rank.tolist()
    assert top_ids.tolist() == wanted.top_ids.tolist()
