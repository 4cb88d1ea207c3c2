"""Steps of single tokens beside chunks of both kinds, in a graph; with a CPU in the place of a GPU."""

from __future__ import annotations

import pytest

from engine.device.gpu_inputs import GpuInputs, Prepared
from engine.device.staging import Layout
from engine.plan import StepPlan
from tests.engine.device.test_gpu_inputs_graphs import chunk, entered, make_inputs

SINGLE = 70  # more rows than graphs sample in which single tokens are items
LAYOUT = Layout(256, 100, num_tiles=48, num_items=32, num_last_items=32, num_single=100)


def mixed(inputs: GpuInputs, step: int, num_single: int, *counts: int) -> Prepared:
    """A step of single tokens at 300, 301, ... and of sampled chunks from 40 on, in slots one after the other."""
    singles = [chunk(slot, 300 + slot, 1) for slot in range(num_single)]
    chunks = [chunk(num_single + number, 40, count) for number, count in enumerate(counts)]
    return inputs.prepare(StepPlan(step, entered(num_single + len(counts)), (*singles, *chunks)))


@pytest.fixture
def inputs() -> GpuInputs:
    """Tiles of chunks, long ones of more than 16 tokens and short ones, are of 8."""
    return make_inputs(100, 1024, max_blocks=80)


def test_single_tokens_and_chunks_have_positions_of_their_own(inputs: GpuInputs) -> None:
    prepared = mixed(inputs, 1, SINGLE, 5, 130)
    assert (prepared.layout, prepared.in_graph, prepared.num_single) == (LAYOUT, True, SINGLE)
    batch, columns = inputs.graph_batch(LAYOUT)
    schedule, pruned = batch.attention.schedule, batch.pruned
    assert schedule is not None
    assert pruned is not None
    assert pruned.schedule is not None
    singles, chunks = [*range(300, 300 + SINGLE)], [*range(40, 45), *range(40, 170)]
    num_tokens = SINGLE + len(chunks)
    assert batch.attention.positions.tolist() == singles + chunks + [-1] * (256 - num_tokens)
    for part in (schedule, pruned.schedule):
        assert part.num_single == 100
        assert part.single_positions is not None
        assert part.chunk_positions is not None
        assert part.single_positions.tolist() == singles + [-1] * (100 - SINGLE)
        assert part.chunk_positions.tolist() == [-1] * SINGLE + chunks + [-1] * (256 - num_tokens)
    tiles = [[first, min(8, num_tokens - first)] for first in range(SINGLE + 5, num_tokens, 8)][::-1]
    assert schedule.tiles.tolist() == tiles + [[0, 0]] * (48 - len(tiles))
    assert schedule.items.tolist() == [[SINGLE, 5, 0, 1, 0]] + [[0] * 5] * 31
    assert pruned.schedule.tiles.tolist() == []
    lasts = [[SINGLE + 4, 1, 0, 1, 0], [num_tokens - 1, 1, 0, 1, 0]]
    assert pruned.schedule.items.tolist() == lasts + [[0] * 5] * 30
    assert columns.index.tolist() == [*range(SINGLE), SINGLE + 4, num_tokens - 1] + [0] * (98 - SINGLE)
    assert columns.slots.tolist() == [*range(SINGLE + 2)] + [-1] * (98 - SINGLE)
    assert batch.sampled is columns.index


def test_a_step_of_fewer_leaves_nothing_of_the_one_before(inputs: GpuInputs) -> None:
    for step in range(2):  # there are two buffers
        assert mixed(inputs, step, 90, 5, 60, 70).layout == LAYOUT
    assert mixed(inputs, 3, SINGLE, 160).layout == LAYOUT
    schedule = inputs.graph_batch(LAYOUT)[0].attention.schedule
    assert schedule is not None
    assert schedule.single_positions is not None
    assert schedule.chunk_positions is not None
    assert schedule.single_positions.tolist() == [*range(300, 300 + SINGLE)] + [-1] * (100 - SINGLE)
    assert schedule.chunk_positions.tolist() == [-1] * SINGLE + [*range(40, 200)] + [-1] * (96 - SINGLE)
    assert schedule.tiles.count_nonzero(dim=0).tolist() == [20, 20]
    assert not schedule.items.any()


@pytest.mark.parametrize(
    ("num_single", "counts", "tokens"),
    [
        (65, [30], 128),
        (68, [2] * 30 + [30], 192),
        (64, [700], 768),
        (1, [700], 768),
        (0, [700], 768),  # where all is long chunks
        (1, [770], None),
        (0, [700, 5], None),  # nobody waits for those who do not attend
        (67, [2] * 32, 192),
        (66, [2] * 33, None),  # more sampled chunks than there is room for
        (70, [9] * 16, 256),
        (70, [9] * 17, None),  # more tiles of short ones
    ],
)
def test_which_steps_have_such_a_graph(
    inputs: GpuInputs, num_single: int, counts: list[int], tokens: int | None
) -> None:
    prepared = mixed(inputs, 1, num_single, *counts)
    assert prepared.in_graph == (tokens is not None)
    assert tokens in (None, prepared.layout.num_tokens)
    assert tokens is None or prepared.layout.num_single == (min(tokens, 100) if num_single else 0)


def test_single_tokens_alone_have_no_such_graph_though_one_is_not_sampled(inputs: GpuInputs) -> None:
    """Nobody would wait for their projection: the kernel before theirs has chunks' rows alone."""
    entries = [chunk(slot, 300, 1, sample=slot < SINGLE) for slot in range(SINGLE + 1)]
    assert not inputs.prepare(StepPlan(1, entered(SINGLE + 1), tuple(entries))).in_graph


def test_of_more_single_tokens_than_a_graph_has_none_is_left_out() -> None:
    inputs = make_inputs(300, 1024, max_blocks=80)
    for num_single in (256, 257):
        entries = [chunk(slot, 300, 1, sample=slot < 100) for slot in range(num_single)]
        plan = StepPlan(1, entered(num_single + 1), (*entries, chunk(num_single, 40, 100)))
        assert inputs.prepare(plan).in_graph == (num_single == 256)
