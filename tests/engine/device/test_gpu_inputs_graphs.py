"""Which steps a graph takes, what its padding holds, and whether there is room for all of them."""

from __future__ import annotations

import dataclasses
from array import array
from itertools import product

import pytest
import torch

from engine.device import gpu_inputs
from engine.device.gpu_inputs import GpuInputs, GpuLimits
from engine.device.graphs import decode_layouts
from engine.device.staging import Columns, Ints, Layout
from engine.plan import PlanEntry, SlotState, StepPlan
from kernels.short_chunks import ShortTiles
from protocol.messages import U32
from protocol.sampling import SamplingParams

#: As float32 bits: a temperature of 0.7.
WARM = array("i", array("f", [0.7]).tobytes())


def fill_rows(columns: Columns[Ints], slots: list[int]) -> None:
    columns.temperature[: len(slots)] = WARM * len(slots)


def make_inputs(
    max_num_seqs: int, max_num_tokens: int, max_blocks: int = 4, query_tile: int = 8, short_tile: int = 8
) -> GpuInputs:
    limits = GpuLimits(
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_blocks=max_blocks,
        block_size=16,
        num_heads=4,
        query_tile=query_tile,
        short=ShortTiles(rows=2 * short_tile, tokens=short_tile, groups=2, head_dim=16),
    )
    return GpuInputs(limits, depth=2, device=torch.device("cpu"), fill_rows=fill_rows)


def chunk(slot: int, start: int, count: int, *, sample: bool = True) -> PlanEntry:
    return PlanEntry(slot, start, count, array(U32, range(count)), (), sample)


def entered(count: int) -> tuple[SlotState, ...]:
    return tuple(SlotState(slot, array(U32, [1]), array(U32), SamplingParams(), 0) for slot in range(count))


@pytest.mark.parametrize(("position", "splits"), [(255, 1), (256, 2), (300, 2)])
def test_the_longest_of_single_tokens_bounds_the_splits_of_a_step_without_a_graph(position: int, splits: int) -> None:
    """Chunks are divided by themselves, whatever their contexts."""
    inputs = make_inputs(8, 100, max_blocks=80)
    entries = (chunk(0, 7, 1), chunk(1, position, 1), chunk(2, 1000, 80))
    prepared = inputs.prepare(StepPlan(1, entered(3), entries))
    assert (prepared.in_graph, prepared.longest) == (False, position + 1)
    batch, _ = inputs.batch(prepared)
    assert batch.attention.schedule is not None
    assert batch.pruned is not None
    assert batch.pruned.schedule is not None
    assert batch.attention.schedule.max_splits == batch.pruned.schedule.max_splits == splits


def test_graphs_have_the_splits_of_a_full_context() -> None:
    inputs = make_inputs(8, 1024, max_blocks=81)
    for layout in [*inputs.decode_layouts, *inputs.chunk_layouts]:
        batch, _ = inputs.graph_batch(layout)
        assert batch.attention.schedule is not None
        assert batch.attention.schedule.max_splits == 6
        assert (batch.pruned is not None) == (layout.num_tiles > 0)
        if batch.pruned is not None:
            assert batch.pruned.schedule is not None
            assert batch.pruned.schedule.max_splits == 6


@pytest.mark.parametrize(("num_sampled", "tokens"), [(63, 256), (64, 256), (65, None), (70, None)])
def test_a_step_that_samples_more_rows_than_a_graph_runs_without(num_sampled: int, tokens: int | None) -> None:
    entries = tuple(chunk(slot, 0, 2, sample=slot < num_sampled) for slot in range(70))
    prepared = make_inputs(100, 1024).prepare(StepPlan(1, entered(70), entries))
    assert prepared.in_graph == (tokens is not None)
    assert prepared.layout.num_tokens == (tokens or 140)
    assert prepared.layout.num_sampled == (64 if tokens else num_sampled)


def test_a_step_of_more_short_chunks_than_a_graph_has_items_runs_without() -> None:
    """A graph of 512 tokens has 160 items: 64, as many as rows that it samples, and 32."""
    inputs = make_inputs(200, 1024)
    entries = tuple(chunk(slot, 0, 2, sample=False) for slot in range(161))
    most = inputs.prepare(StepPlan(1, entered(160), entries[:160]))
    assert (most.layout, most.in_graph) == (Layout(512, 64, num_items=160), True)
    items = inputs.graph_batch(most.layout)[1].items.view(-1, 5)
    assert items.tolist() == [[2 * row, 2, 0, 1, 0] for row in range(160)]
    assert not inputs.prepare(StepPlan(2, entered(161), entries)).in_graph


@pytest.mark.parametrize(
    ("before", "after", "layout"),
    [
        ([1, 1, 1, 1], [1, 1, 1], Layout(4, 4)),
        ([1, 1, 1, 1, 1, 1, 1, 9], [1, 10], Layout(16, 8, num_items=42)),
    ],
    ids=["decodes", "chunks"],
)
def test_padding_holds_nothing_of_the_steps_before(before: list[int], after: list[int], layout: Layout) -> None:
    inputs = make_inputs(8, 100)
    for step in range(2):  # there are two buffers
        entries = tuple(chunk(7 - row, 3 + row, count) for row, count in enumerate(before))
        assert inputs.prepare(StepPlan(step, entered(8), entries)).layout == layout
    _, columns = inputs.graph_batch(layout)
    assert columns.temperature.tolist() == [*WARM] * len(before)
    entries = tuple(chunk(3 - row, 3, count) for row, count in enumerate(after))
    assert inputs.prepare(StepPlan(3, (), entries)).layout == layout
    batch, columns = inputs.graph_batch(layout)
    tokens, rows = sum(after), len(after)
    unused = layout.num_tokens - tokens
    assert batch.ids.tolist() == [number for count in after for number in range(count)] + [0] * unused
    assert batch.attention.seq_index.tolist() == [3 - r for r in range(rows) for _ in range(after[r])] + [0] * unused
    assert batch.attention.positions.tolist()[tokens:] == [-1] * unused
    unused = layout.num_sampled - rows
    assert columns.index.tolist() == [sum(after[: row + 1]) - 1 for row in range(rows)] + [0] * unused
    assert columns.slots.tolist() == [3 - row for row in range(rows)] + [-1] * unused
    assert columns.temperature.tolist() == [*WARM] * rows + [0] * unused


@pytest.mark.parametrize("max_num_seqs", [1, 8, 200])
@pytest.mark.parametrize("max_num_tokens", [16, 100, 640, 1024])
def test_all_tables_may_change_in_a_step_of_any_graph(max_num_seqs: int, max_num_tokens: int) -> None:
    for query_tile, short_tile in product((8, 128), (4, 64)):
        inputs = make_inputs(max_num_seqs, max_num_tokens, 4, query_tile, short_tile)
        for layout in [*inputs.decode_layouts, *inputs.chunk_layouts]:
            assert len(inputs.graph_batch(layout)[1].changes) == 2 * max_num_seqs * 4


@pytest.mark.parametrize(
    "counts",
    [[1] * 7 + [65], [9] * 8, [4] * 7 + [44], [17, 17, 17, 21], [72]],
    ids=["decodes", "short", "both", "long", "one"],
)
def test_all_tables_may_change_in_the_largest_step_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    """Their contexts of 12 splits are shared out by as many programs as there may be."""
    for name in ("decode_layouts", "chunk_layouts"):
        monkeypatch.setattr(gpu_inputs, name, lambda *sizes: [])
    for query_tile in (8, 128):
        inputs = make_inputs(8, 72, 192, query_tile)
        entries = tuple(chunk(slot, 3000, count) for slot, count in enumerate(counts))
        _, columns = inputs.batch(inputs.prepare(StepPlan(1, entered(8), entries)))
        assert len(columns.changes) == 2 * 8 * 192


@pytest.mark.parametrize("num_sms", [58, 108, 132])
def test_single_tokens_beside_chunks_find_the_kernels_of_the_decode_graphs(num_sms: int) -> None:
    """Which are compiled when the engine starts. They differ in what is not the number of programs."""
    pytest.importorskip("triton")
    from kernels.gpu.decode import Spread, choose_spread
    from kernels.gpu.launch import Limits

    limit = Limits(num_sms=num_sms, shared_memory=232_448, dependent=True)

    def kernel(num_rows: int, num_kv_heads: int, max_splits: int) -> Spread:
        spread = choose_spread(num_rows, num_kv_heads, max_splits, limit=limit, split_bytes=131_072)
        return dataclasses.replace(spread, programs=0)

    for max_num_seqs, num_kv_heads, full in product((1, 3, 8, 40, 300), (1, 2, 3, 4, 5, 8, 10, 16, 32), (1, 2, 160)):
        compiled = {kernel(layout.num_tokens, num_kv_heads, full) for layout in decode_layouts(max_num_seqs)}
        for max_splits in {1, 2, 3, 8, full}:
            if max_splits <= full:
                assert {kernel(rows, num_kv_heads, max_splits) for rows in range(1, max_num_seqs + 1)} <= compiled
