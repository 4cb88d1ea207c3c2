"""The numbers of a step as a GPU gets them, with a CPU in its place."""

from __future__ import annotations

from array import array

import pytest
import torch

from engine.device import gpu_inputs
from engine.device.gpu_inputs import GpuInputs, GpuLimits
from engine.device.staging import Columns, Ints, Layout
from engine.layers.attention import ForwardBatch
from engine.plan import PlanEntry, SlotState, StepPlan
from kernels.short_chunks import ShortTiles
from protocol.messages import U32
from protocol.sampling import SamplingParams


def fill_rows(columns: Columns[Ints], slots: list[int]) -> None:
    columns.top_k[: len(slots)] = array("i", [slot + 100 for slot in slots])


def make_inputs(max_num_tokens: int = 100, max_blocks: int = 10) -> GpuInputs:
    limits = GpuLimits(
        max_num_seqs=8,
        max_num_tokens=max_num_tokens,
        max_blocks=max_blocks,
        block_size=16,
        num_heads=4,
        query_tile=8,
        short=ShortTiles(rows=16, tokens=8, groups=2, head_dim=16),
    )
    return GpuInputs(limits, depth=2, device=torch.device("cpu"), fill_rows=fill_rows)


@pytest.fixture
def inputs() -> GpuInputs:
    return make_inputs()


def entered(*slots: int) -> tuple[SlotState, ...]:
    return tuple(SlotState(slot, array(U32, [1]), array(U32), SamplingParams(), 0) for slot in slots)


def entry(slot: int, start: int, ids: list[int], *, short: bool = False, blocks: tuple[int, ...] = ()) -> PlanEntry:
    return PlanEntry(slot, start, len(ids) + short, array(U32, ids), blocks, True)


def tables_of(batch: ForwardBatch) -> torch.Tensor:
    """The block tables once the step's first kernel has changed them."""
    start, tables = batch.start, batch.attention.block_tables
    assert start is not None
    count = int(start.num_changes)
    start.cells[start.changes[:count].long()] = start.changes[count : 2 * count]
    assert start.cells.data_ptr() == tables.data_ptr()
    return tables


def test_decodes_take_a_graph_and_name_slots_of_unknown_ids(inputs: GpuInputs) -> None:
    plan = StepPlan(1, entered(5, 2), (entry(5, 16, [], short=True, blocks=(9, 4)), entry(2, 3, [7], blocks=(6,))))
    prepared = inputs.prepare(StepPlan(1, plan.entered, (*plan.entries, entry(0, 0, [3], blocks=(1,)))))
    assert (prepared.layout, prepared.in_graph, prepared.num_single) == (Layout(4, 4), True, 3)
    batch, columns = inputs.graph_batch(prepared.layout)
    assert batch.ids.tolist() == [-6, 7, 3, 0]
    assert batch.sampled is None
    assert batch.attention.positions.tolist() == [16, 3, 0, -1]
    assert batch.attention.seq_index.tolist() == [5, 2, 0, 0]
    tables = tables_of(batch)
    assert tables[5, :3].tolist() == [9, 4, 0]
    assert tables[2, 0] == 6
    assert columns.slots.tolist() == [5, 2, 0, -1]
    assert columns.places.tolist()[:3] == [17, 4, 1]
    assert columns.top_k.tolist()[:3] == [105, 102, 100]


def test_blocks_are_appended_until_the_slot_is_entered_again(inputs: GpuInputs) -> None:
    def step(number: int, plan_entry: PlanEntry, *new: int) -> list[int]:
        prepared = inputs.prepare(StepPlan(number, entered(*new), (plan_entry,)))
        return tables_of(inputs.graph_batch(prepared.layout)[0])[3, :2].tolist()

    assert step(1, entry(3, 0, [1], blocks=(7,)), 3) == [7, 0]
    assert step(2, entry(3, 16, [1], blocks=(8,))) == [7, 8]
    assert step(3, entry(3, 17, [1])) == [7, 8]
    assert step(4, entry(3, 0, [1], blocks=(5,)), 3) == [5, 8]


def test_all_slots_may_get_whole_tables_in_one_step(inputs: GpuInputs) -> None:
    rows = torch.arange(80).view(8, 10).flip(0)
    plan = StepPlan(1, entered(*range(8)), tuple(entry(s, 158, [1], blocks=tuple(rows[s].tolist())) for s in range(8)))
    prepared = inputs.prepare(plan)
    assert tables_of(inputs.graph_batch(prepared.layout)[0]).tolist() == rows.tolist()


def test_short_chunks_take_a_graph_in_which_all_rows_are_items(inputs: GpuInputs) -> None:
    chunk = PlanEntry(1, 20, 10, array(U32, range(10)), (0, 1), False)
    prepared = inputs.prepare(StepPlan(1, entered(0, 1), (entry(0, 4, [9], blocks=(2,)), chunk)))
    assert (prepared.layout, prepared.in_graph) == (Layout(16, 8, num_items=42), True)
    batch, columns = inputs.graph_batch(prepared.layout)
    schedule = batch.attention.schedule
    assert schedule is not None
    assert schedule.num_single == 0
    assert schedule.tiles.tolist() == []
    assert schedule.items.tolist() == [[0, 1, 0, 1, 0], [1, 8, 0, 1, 0], [9, 2, 0, 1, 0]] + [[0] * 5] * 39
    assert batch.attention.positions.tolist() == [4, *range(20, 30)] + [-1] * 5
    assert columns.index.tolist() == [0] * 8
    assert columns.slots.tolist() == [0] + [-1] * 7


def test_long_chunks_run_without_a_graph(inputs: GpuInputs) -> None:
    chunk = PlanEntry(1, 0, 80, array(U32, range(80)), (0, 1, 2, 3, 4), True)
    prepared = inputs.prepare(StepPlan(1, entered(0, 1), (entry(0, 4, [9], blocks=(5,)), chunk)))
    assert (prepared.layout, prepared.in_graph, prepared.num_single) == (Layout(81, 2, 10, 0, 1), False, 1)
    batch, columns = inputs.batch(prepared)
    schedule = batch.attention.schedule
    assert schedule is not None
    assert (schedule.num_single, schedule.max_splits) == (1, 1)
    assert schedule.tiles[-1].tolist() == [1, 8]
    assert schedule.items.tolist() == []
    assert batch.sampled is columns.index
    assert batch.pruned is not None
    pruned = batch.pruned.schedule
    assert pruned is not None
    assert (pruned.num_single, pruned.max_splits) == (1, 1)
    assert pruned.tiles.tolist() == []
    assert pruned.items.tolist() == [[80, 1, 0, 1, 0]]
    assert columns.index.tolist() == [0, 80]
    assert prepared.slots == [0, 1]
    assert prepared.places == [5, 80]


def test_short_chunks_beside_long_ones_are_items(inputs: GpuInputs) -> None:
    """The end of a prompt whose other 130 positions are cached, between a single token and a long chunk."""
    end = PlanEntry(1, 130, 9, array(U32, range(9)), tuple(range(9)), True)
    long = PlanEntry(2, 0, 70, array(U32, range(70)), (10, 11, 12, 13, 14), False)
    prepared = inputs.prepare(StepPlan(1, entered(0, 1, 2), (entry(0, 4, [9], blocks=(9,)), end, long)))
    assert prepared.layout == Layout(80, 2, num_tiles=9, num_items=2, num_last_items=1)
    batch, _ = inputs.batch(prepared)
    schedule, pruned = batch.attention.schedule, batch.pruned
    assert schedule is not None
    assert pruned is not None
    assert pruned.schedule is not None
    assert pruned.schedule.items.tolist() == [[9, 1, 0, 1, 0]]
    assert schedule.num_single == 1
    assert schedule.items.tolist() == [[1, 8, 0, 1, 0], [9, 1, 0, 1, 0]]
    assert schedule.tiles.tolist() == [[first, min(8, 80 - first)] for first in range(74, 9, -8)]


def test_the_last_layer_has_nothing_to_attend_for_where_nothing_is_sampled(inputs: GpuInputs) -> None:
    chunk = PlanEntry(1, 0, 80, array(U32, range(80)), (0, 1, 2, 3, 4), False)
    batch, _ = inputs.batch(inputs.prepare(StepPlan(1, entered(1), (chunk,))))
    assert batch.sampled is not None
    assert batch.sampled.tolist() == []
    assert batch.pruned is not None
    assert batch.pruned.schedule is not None
    assert (batch.pruned.schedule.num_single, batch.pruned.schedule.items.tolist()) == (0, [])


def test_a_long_context_is_shared_out_in_the_last_layer_as_well() -> None:
    """Of two single tokens one is sampled, of two chunks the second, which has five splits of context."""
    inputs = make_inputs(2000, 80)
    first, second = (
        PlanEntry(slot, 100, count, array(U32, range(count)), (), sample)
        for slot, count, sample in ((2, 30, False), (3, 1000, True))
    )
    begun = PlanEntry(0, 5, 1, array(U32, [3]), (), False)
    plan = StepPlan(1, entered(0, 1, 2, 3), (begun, entry(1, 7, [9]), first, second))
    batch, columns = inputs.batch(inputs.prepare(plan))
    assert columns.index.tolist() == [1, 1031]
    assert batch.pruned is not None
    assert batch.pruned.schedule is not None
    assert batch.pruned.schedule.num_single == 2
    assert batch.pruned.schedule.items.tolist() == [[1031, 1, program, 5, 0] for program in range(5)]


def test_long_chunks_take_a_graph_of_more_tokens() -> None:
    """Chunks of one tile more than is short, one of which is sampled. With a short chunk beside them no graph has the
    step."""
    inputs = make_inputs(2000, 80)
    long, longer = (
        PlanEntry(slot, start, count, array(U32, range(count)), (), sample)
        for slot, start, count, sample in ((1, 100, 602, True), (2, 0, 17, False))
    )
    prepared = inputs.prepare(StepPlan(1, entered(1, 2), (long, longer)))
    layout = Layout(640, 8, num_tiles=96, num_last_items=40)
    assert (prepared.layout, prepared.in_graph) == (layout, True)
    batch, columns = inputs.graph_batch(layout)
    schedule, pruned = batch.attention.schedule, batch.pruned
    assert schedule is not None
    assert pruned is not None
    assert pruned.schedule is not None
    tiles = [[602, 8], [610, 8], [618, 1]][::-1] + [[at, min(8, 602 - at)] for at in range(600, -1, -8)]
    assert schedule.tiles.tolist() == tiles + [[0, 0]] * (96 - len(tiles))
    assert schedule.items.tolist() == pruned.schedule.tiles.tolist() == []
    assert schedule.num_single == pruned.schedule.num_single == 0
    assert columns.index.tolist() == [601] + [0] * 7
    assert inputs.graph_columns(layout) is columns
    lasts = [[601, 1, program, 3, 0] for program in range(3)]
    assert pruned.schedule.items.tolist() == lasts + [[0] * 5] * 37
    short = PlanEntry(0, 40, 5, array(U32, range(5)), (), True)
    assert not inputs.prepare(StepPlan(1, entered(0, 1), (long, short))).in_graph


def test_long_chunks_alone_take_a_graph_without_items() -> None:
    inputs = make_inputs(2000, 80)
    chunk = PlanEntry(1, 0, 1000, array(U32, range(1000)), (), True)
    prepared = inputs.prepare(StepPlan(1, entered(1), (chunk,)))
    assert prepared.layout == Layout(1024, 8, num_tiles=144, num_items=0, num_last_items=40)
    batch, columns = inputs.graph_batch(prepared.layout)
    schedule, pruned = batch.attention.schedule, batch.pruned
    assert schedule is not None
    assert schedule.num_single == 0
    assert schedule.items.tolist() == []
    assert schedule.tiles.tolist() == [[at, 8] for at in range(992, -1, -8)] + [[0, 0]] * 19
    assert pruned is not None
    assert pruned.schedule is not None
    assert pruned.schedule.num_single == 0
    assert pruned.schedule.items.tolist() == [[999, 1, n, 4, 0] for n in range(4)] + [[0] * 5] * 36
    assert batch.sampled is columns.index


def test_a_graph_forgets_the_tiles_and_items_of_the_step_before() -> None:
    inputs = make_inputs(2000, 80)
    for number, (count, sample) in enumerate([(1000, True), (900, True), (910, False)]):
        chunk = PlanEntry(0, 0, count, array(U32, range(count)), (), sample)
        layout = inputs.prepare(StepPlan(number, entered(0), (chunk,))).layout
        assert layout == Layout(1024, 8, num_tiles=144, num_last_items=40)
    _, columns = inputs.graph_batch(layout)
    assert columns.tiles.view(-1, 2).count_nonzero(dim=0).tolist() == [113, 114]
    assert not columns.last_items.any()
    assert not columns.index.any()


def test_a_step_whose_chunks_need_more_tiles_than_a_graph_has_runs_without() -> None:
    """Of 17 tokens, three tiles each; 640 have room for 96, and each 128 more for 16 more."""
    inputs = make_inputs(2000, 80)
    entries = tuple(PlanEntry(0, 0, 17, array(U32, range(17)), (), False) for _ in range(49))
    for count, tokens in ((29, 512), (31, 640), (33, 768), (37, 768), (38, 896), (45, 1024), (48, 1024), (49, None)):
        prepared = inputs.prepare(StepPlan(1, entered(0), entries[:count]))
        assert prepared.in_graph == (tokens is not None)
        assert tokens in (None, prepared.layout.num_tokens)


def test_without_graphs_a_step_has_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode_layouts", "chunk_layouts"):
        monkeypatch.setattr(gpu_inputs, name, lambda *sizes: [])
    prepared = make_inputs().prepare(StepPlan(1, entered(5, 2), (entry(5, 16, [8], blocks=(9,)), entry(2, 3, [7]))))
    assert (prepared.layout, prepared.in_graph, prepared.num_single) == (Layout(2, 2), False, 2)
