"""How splits of single tokens are shared out. The kernel itself: `test_interpreted`, `test_compile`, `test_on_gpu`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from kernels.gpu.decode import Spread, choose_spread, scratch_bytes
from kernels.gpu.launch import Limits

H200 = Limits(num_sms=132, shared_memory=232_448, dependent=True)
A100 = Limits(num_sms=108, shared_memory=166_912, dependent=False)


L4 = Limits(num_sms=58, shared_memory=101_376, dependent=False)


def spread_of(
    num_rows: int, num_kv_heads: int = 8, max_splits: int = 160, limit: Limits = H200, head_dim: int = 128
) -> Spread:
    split_bytes = 2 * 256 * head_dim * 2
    return choose_spread(num_rows, num_kv_heads, max_splits, limit=limit, split_bytes=split_bytes)


def test_few_rows_ask_early_and_many_walk() -> None:
    assert spread_of(1) == Spread(66, warps=4, stages=5, early=True)
    assert spread_of(4) == Spread(16, warps=4, stages=5, early=True)
    assert spread_of(8) == Spread(8, warps=4, stages=5, early=True)
    assert spread_of(16) == spread_of(32) == Spread(16, warps=2, stages=3)
    assert spread_of(64) == spread_of(256) == Spread(16, warps=2, stages=3, walk=True)
    assert spread_of(64, max_splits=16) == Spread(1, warps=2, stages=3, walk=True)  # no context is long


@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 33, 34, 256])
def test_steps_without_graphs_find_the_kernels_of_graphs(num_rows: int) -> None:
    """Whose contexts may be long: what a kernel is compiled for goes by the rows alone."""

    def kind(spread: Spread) -> tuple[bool, int, int, bool]:
        return spread.walk, spread.warps, spread.stages, spread.early

    assert {kind(spread_of(num_rows, max_splits=splits)) for splits in range(1, 200)} == {kind(spread_of(num_rows))}


def test_what_does_not_fit_is_not_held() -> None:
    """Of smaller shared memory, two tiles."""
    assert spread_of(1, limit=A100) == Spread(54, warps=4, stages=5, early=True)
    assert spread_of(50, limit=A100) == Spread(16, warps=2, stages=3, walk=True)
    assert spread_of(1, 4, limit=L4) == Spread(58, warps=4, stages=5, early=True)
    assert spread_of(1, 4, limit=L4, head_dim=256) == Spread(58, warps=4, stages=3, early=True)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_parts_fit_into_the_scratch_accounted(num_kv_heads: int) -> None:
    context, split, head_dim, num_heads = 40_960, 256, 128, 32
    for num_rows in range(1, 600):
        shared = spread_of(num_rows, num_kv_heads).shared_rows(num_rows)
        parts = shared * num_heads * (context // split) * (head_dim + 2) * 4
        assert parts <= scratch_bytes(num_heads, num_kv_heads, head_dim, 600, context, split, H200)
