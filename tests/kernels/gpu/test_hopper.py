"""Attention of chunks by warps with parts of their own: what it compiles to, and its bits on a GPU of capability 9.0.

Triton's interpreter cannot run it: there are no warps in it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels.gpu import prefill
from kernels.gpu.launch import limits
from tests.kernels.gpu.compiling import compiling

#: (start, tokens) of chunks that begin and end on both sides of tiles, splits and blocks.
CHUNKS = ((0, 300), (1000, 77), (63, 65), (64, 64), (255, 2), (256, 33), (511, 513), (0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Arguments of `attend_tiles`. What is no key or value of a chunk is NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    seq_index: Tensor
    positions: Tensor
    tiles: Tensor
    arrivals: Tensor

    @classmethod
    def draw(
        cls,
        heads: tuple[int, int, int],
        block_size: int,
        dtype: torch.dtype,
        chunks: tuple[tuple[int, int], ...] = CHUNKS,
        device: str = "cpu",
    ) -> Chunks:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(5)
        ends = [start + count for start, count in chunks]
        used = [-(-end // block_size) for end in ends]
        order = torch.randperm(sum(used) + 3, generator=generator)
        tables = torch.full((len(chunks), max(used)), len(order) - 1, dtype=torch.int32)
        pool = torch.full((2, len(order), num_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
        for row, (end, blocks) in enumerate(zip(ends, order[: sum(used)].split(used), strict=True)):
            tables[row, : len(blocks)] = blocks
            whole = torch.randn(2, len(blocks) * block_size, num_kv_heads, head_dim, generator=generator).to(dtype)
            whole[:, end:] = math.nan
            pool[:, blocks] = whole.unflatten(1, (-1, block_size)).transpose(2, 3)
        size = prefill.query_tile(num_heads, num_kv_heads, head_dim, dtype)
        counts = [count for _, count in chunks]
        first_rows = [sum(counts[:row]) for row in range(len(counts))]
        tiles = [
            (first + at, min(size, count - at))
            for first, count in zip(first_rows, counts, strict=True)
            for at in range(0, count, size)
        ]
        width = num_heads * head_dim
        qkv = torch.randn(sum(counts), width + 2 * num_kv_heads * head_dim, generator=generator).to(dtype)
        return cls(
            qkv.to(device)[:, :width].unflatten(1, (num_heads, head_dim)),
            *(pool[0].transpose(2, 3).to(device), pool[1].to(device), tables.to(device)),
            torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(counts)).int().to(device),
            torch.cat([torch.arange(start, start + count) for start, count in chunks]).int().to(device),
            torch.tensor([*tiles[::-1], (0, 0), (0, 0)], dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )

    def attend(self, *, cap: float = 0.0, out: Tensor | None = None) -> Tensor:
        """[M, HQ, D]; 7 where nothing was written."""
        found = torch.full(self.q.shape, 7.0, dtype=self.q.dtype, device=self.q.device) if out is None else out
        prefill.attend_tiles(
            *(self.q, self.keys, self.values, self.tables, self.seq_index, self.positions),
            *(self.tiles, self.arrivals, found),
            **{"scale": 0.1, "cap": cap, "value_scale": 1.0, "window": 0, "tile": 64, "split": 256},
        )
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [((32, 8, 128), 16, torch.bfloat16), ((8, 8, 64), 128, torch.float16)],
    ids=str,
)
def test_it_compiles_to_what_makes_it_fast(
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asynchronous products and copies, registers given from warp to warp, and none of them spilled in a loop."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    with compiling(90, monkeypatch, warpgroups=True) as compiled:
        Chunks.draw(heads, block_size, dtype).attend()
    assert compiled.names == ["hopper_prefill_kernel"]
    (assembly,) = compiled.assembly
    assert "wgmma.mma_async.sync.aligned.m64n64k16" in assembly
    assert "cp.async.bulk.tensor.3d" in assembly
    assert {"setmaxnreg.dec.sync.aligned.u32 \t240", "setmaxnreg.dec.sync.aligned.u32 \t24"} <= set(
        re.findall(r"setmaxnreg\S+ \t\d+", assembly)
    )
    log = capsys.readouterr().out
    assert "serialized" not in log
    assert all(int(spilled) <= 32 for spilled in re.findall(r"(\d+) bytes spill stores", log))


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Chunks.draw((4, 2, 128), 16, torch.bfloat16, ((0, 3),))
    plain = {"cap": 0.0, "window": 0, "tile": 64}
    assert not prefill.takes_warpgroups(case.q, case.values, **plain)
    monkeypatch.setattr(prefill, "limits", lambda device: replace(limits(device), warpgroups=True))
    assert prefill.takes_warpgroups(case.q, case.values, **plain)
    for other in ({"cap": 5.0}, {"window": 100}, {"tile": 32}):
        assert not prefill.takes_warpgroups(case.q, case.values, **plain | other)
    assert not prefill.takes_warpgroups(case.q, case.values.to(torch.float8_e4m3fn), **plain)
    assert not prefill.takes_warpgroups(case.q.float(), case.values.float(), **plain)
    for shape, taken in (((5, 2, 48, 128), False), ((5, 2, 192, 64), True), ((5, 2, 16, 80), False)):
        q, values = torch.empty(1, 4, shape[3], dtype=torch.float16), torch.empty(shape, dtype=torch.float16)
        assert prefill.takes_warpgroups(q, values, **plain) == taken


@pytest.fixture
def cuda() -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for GPUs of capability 9.0")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        ((32, 8, 128), 16, torch.bfloat16),
        ((8, 8, 128), 32, torch.bfloat16),
        ((16, 8, 64), 64, torch.bfloat16),
        ((12, 4, 128), 192, torch.float16),
        ((16, 2, 128), 16, torch.float16),
    ],
    ids=str,
)
def test_the_bits_are_those_of_prefill(
    cuda: str, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Chunks.draw(heads, block_size, dtype, device=cuda)
    assert prefill.takes_warpgroups(case.q, case.values, cap=0.0, window=0, tile=64)
    found = case.attend()
    again = case.attend()
    monkeypatch.setattr(prefill, "limits", lambda device: replace(limits(device), warpgroups=False))
    wanted = case.attend()
    assert not wanted.isnan().any()
    assert torch.equal(found, wanted)
    assert torch.equal(again, wanted)
    assert not case.arrivals.any()


@pytest.mark.gpu
def test_it_can_be_captured(cuda: str) -> None:
    """Also that more items than programs, and none at all, come to an end."""
    case = Chunks.draw((32, 8, 128), 16, torch.bfloat16, ((0, 2000), (700, 1000)), cuda)
    wanted = case.attend()
    found = torch.zeros_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.attend(out=found)
    graph.replay()
    assert torch.equal(found, wanted)
    empty = replace(case, tiles=torch.zeros_like(case.tiles))
    assert bool((empty.attend() == 7).all())
    assert not case.arrivals.any()
