"""Every kernel compiles for the GPUs it is meant for, as it would be launched there. No GPU needed."""

from __future__ import annotations

import re

import pytest
import torch

import kernels

pytest.importorskip("triton")
from kernels.gpu import (
    activation,
    attention,
    embedding,
    experts,
    logprobs,
    matmul,
    noise,
    norm,
    products,
    routing,
    sampling,
    vector,
)
from kernels.short_chunks import ITEM_COLUMNS
from tests.kernels.gpu.compiling import Compiled, compiling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROW_COUNTS = (1, 17, 33, 65)


@pytest.fixture(params=[80, 90], ids="sm_{}".format)
def capability(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_operators(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(capability, monkeypatch) as compiled:
        x = torch.empty(2, 4096, dtype=dtype)
        norm.rms_norm(x, x[0], 1e-5, x)
        for kind in kernels.Activation:
            activation.activate_and_mul(x, kind)
        activation.soft_cap_(x.float(), 30.0)
        ids = torch.empty(8, dtype=torch.int32)
        embedding.embed_ahead(ids, kernels.StepStart(ids, ids, ids[:1], ids), x, dtype)
    assert compiled.names == [
        "rms_norm_kernel",
        "activate_and_mul_kernel",
        "activate_and_mul_kernel",
        "soft_cap_kernel",
        "embed_kernel",
    ]
    assert all(("griddepcontrol" in text) == (capability >= 90) for text in compiled.assembly)
    # A step's first kernel lets nothing of the step begin before all of the last one is done: attention relies on it.
    assert compiled.dependent == (compiled.names[:-1] if capability >= 90 else [])
    assert "griddepcontrol.wait" not in compiled.assembly[-1]
    if capability >= 90:  # and lets the next begin when the tables that it reads before it waits are in memory
        stores = r"st\.global.*fence\.acq_rel\.gpu.*bar\.sync.*griddepcontrol\.launch_dependents.*st\.global"
        assert re.search(stores, compiled.assembly[-1], re.DOTALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(capability, monkeypatch) as compiled:
        for num_out, num_in in ((6144, 4096), (4096, 14336), (1000, 200)) if dtype is torch.bfloat16 else ((96, 200),):
            for rows in ROW_COUNTS:
                x, weight = torch.empty(rows, num_in, dtype=dtype), torch.empty(num_out, num_in, dtype=dtype)
                matmul.linear(x, weight, None, dtype)
                matmul.linear(x, weight, torch.empty(num_out), torch.float32)
                matmul.gated_linear(x, weight, None)
            matmul.gated_linear(x, weight, None, kernels.Activation.GELU_TANH)
    assert set(compiled.names) == {"linear_kernel"}
    assert _uses_wgmma(compiled) == (capability >= 90 and dtype is torch.bfloat16)


def test_products_of_a_single_row_as_sums(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(capability, monkeypatch) as compiled:
        for num_out, num_in in ((12288, 4096), (8192, 1024), (6144, 576)):
            x, weight = torch.empty(1, num_in).bfloat16(), torch.empty(num_out, num_in).bfloat16()
            vector.multiply(x, weight, None, torch.bfloat16)
            vector.multiply(x, weight, torch.empty(num_out), torch.float32)
            vector.multiply(x, weight, None, torch.bfloat16, residual=torch.empty(1, num_out).bfloat16())
            vector.multiply(x, weight, None, torch.bfloat16, gate=kernels.Activation.SILU)
    assert set(compiled.names) == {"vector_kernel"}
    # The weight is on its way before the kernel waits for x.
    for text in compiled.assembly if capability >= 90 else ():
        assert "ld.global" in text[: text.index("griddepcontrol.wait")]


def test_products_of_small_weights(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(capability, monkeypatch) as compiled:
        for num_out, num_in in ((4096, 1024), (1024, 2048), (1024, 3072)):
            weight = torch.empty(num_out, num_in, dtype=torch.bfloat16)
            for rows in (1, *ROW_COUNTS):
                products.linear(torch.empty(rows, num_in, dtype=torch.bfloat16), weight, None, torch.bfloat16)
        weight = torch.empty(6144, 1024, dtype=torch.bfloat16)
        for rows in ROW_COUNTS:
            products.gated_linear(torch.empty(rows, 1024, dtype=torch.bfloat16), weight, None)
        x, norm = torch.empty(1, 1024, dtype=torch.bfloat16), kernels.RowNorm(weight[0], 1e-6)
        products.normed_gated_linear(x, norm, weight, None)
        products.normed_linear(x, norm, weight[:4096], torch.empty(4096))
    held = [text for name, text in zip(compiled.names, compiled.layouts, strict=True) if name == "held_kernel"]
    assert bool(held) == (capability >= 90)
    assert all(re.search(r" tt\.dot %\S+, %\S+, %cst", text) for text in held)  # a bias is added after, not before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (
        ((8, 4096, 14336, 2), (128, 2048, 768, 8), (5, 200, 48, 3)) if dtype is torch.bfloat16 else ((5, 200, 48, 3),)
    )
    with compiling(capability, monkeypatch) as compiled:
        for count, hidden, inner, top_k in sizes:
            for rows in ROW_COUNTS:
                route = routing.route(torch.empty(rows, count), top_k, renormalize=True)
                gate_up = torch.empty(1, 2 * inner, hidden, dtype=dtype).expand(count, -1, -1)
                down = torch.empty(1, hidden, inner, dtype=dtype).expand(count, -1, -1)
                experts.mix_experts(torch.empty(rows, hidden, dtype=dtype), *route, gate_up, down)
    assert set(compiled.names) == {"route_kernel", "group_kernel", "expert_linear_kernel", "add_up_kernel"}


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 80), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 256)],
    ids=str,
)
def test_attention(capability: int, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _compile_attention(capability, dtype, dtype, head_dim, monkeypatch)
    if capability >= 90 and dtype is torch.bfloat16:  # a single row's keys are on their way before the kernel waits
        alone = compiled.assembly[compiled.names.index("decode_kernel")]
        assert "cp.async.cg" in alone[: alone.index("griddepcontrol.wait")]


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 64), (torch.float32, 80)],
    ids=str,
)
def test_attention_to_an_fp8_pool(dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any number of rows take 2 neighbours of K a lane, and so add in one order."""
    compiled = _compile_attention(90, dtype, kernels.FP8, head_dim, monkeypatch)
    readers = [
        text for name, text in zip(compiled.names, compiled.assembly, strict=True) if name != "rope_write_kernel"
    ]
    assert all("cvt.rn.f16x2.e4m3x2" in text for text in readers)
    widths = {width for text in compiled.layouts for width in re.findall(r"kWidth = (\d)", text)}
    assert widths == (set() if dtype is torch.float32 else {"2"})


def _compile_attention(
    capability: int, dtype: torch.dtype, pool: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> Compiled:
    heads, kv_heads, rows = 8, 2, 1
    keys, values = kernels.empty_kv_cache(8, 16, kv_heads, head_dim, dtype=pool, device=torch.device("cpu"))
    keys = values.transpose(2, 3)
    index = torch.zeros(rows, dtype=torch.int32)
    with compiling(capability, monkeypatch) as compiled:
        normed = {"norms": kernels.HeadNorms(*torch.empty(2, head_dim, dtype=dtype), 1e-6)}
        for num_rows, options in ((rows, normed), (400, {"window": 100}), (40, {"soft_cap": 2.0})):
            tiles, items = (torch.zeros(1, columns, dtype=torch.int32) for columns in (2, ITEM_COLUMNS))
            schedule = kernels.TileSchedule(num_rows, tiles, items, 8, index)
            batch = kernels.AttentionBatch(torch.zeros(1, 128, dtype=torch.int32), index, index, schedule)
            qkv = torch.empty(num_rows + 1, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
            attention.rotate_and_attend(
                *(qkv, torch.empty(100, head_dim), keys, values, batch),
                **({"window": 0, "soft_cap": 0.0, "norms": None} | options),
                num_heads=heads,
                scale=1.0,
                scales=kernels.UNSCALED,
                tile=64,
                split=256,
            )
    assert set(compiled.names) == {"rope_write_kernel", "decode_kernel", "prefill_kernel", "short_kernel"}
    return compiled


def test_sampling(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling(capability, monkeypatch) as compiled:
        logits, column, ids = torch.empty(2, 128256), torch.empty(2), torch.empty(2, dtype=torch.int32)
        seeds = ids.long()
        sampling.sample_ahead(logits, column, ids, column, column, seeds, ids, ids, ids)
        sampling.sample_ahead(
            logits, column, ids, column, column, seeds, ids, ids, ids, torch.empty(2, 4008, dtype=torch.int32)
        )
        logprobs.logprobs_ahead(logits, ids, 5)
        noise.gumbel_noise(seeds, seeds, 1000)
    assert compiled.names == [
        "threshold_kernel",
        "bound_kernel",
        "choose_kernel",
        "threshold_kernel",
        "bound_kernel",
        "choose_kernel",
        "logprobs_kernel",
        "gumbel_noise_kernel",
    ]


def _uses_wgmma(compiled: Compiled) -> bool:
    return any("wgmma" in text for text in compiled.assembly)
