"""Short chunks divided among programs: every split of every tile once, within the items and the memory there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.short_chunks import ITEM_COLUMNS, ShortTiles

TILES = ShortTiles(rows=64, tokens=16, groups=8, head_dim=128)


def items_of(chunks: list[tuple[int, int]], most: int, tiles: ShortTiles = TILES) -> np.ndarray:
    """Items [n, 5] of chunks given as (positions before, tokens)."""
    counts = [count for _, count in chunks]
    begins = itertools.accumulate(counts[:-1], initial=0)
    placed = [(begin, count, start + count) for begin, (start, count) in zip(begins, chunks, strict=True)]
    return np.array(tiles.items(placed, most)).reshape(-1, ITEM_COLUMNS)


def test_the_end_of_a_cached_prompt_is_shared_by_a_program_a_split() -> None:
    items = items_of([(8176, 16)], 69)
    assert items[:, :2].tolist() == [[0, 16]] * 32
    assert items[:, 2].tolist() == list(range(32))
    assert set(items[:, 3].tolist()) == {32}
    assert set(items[:, 4].tolist()) == {0}


def test_without_spare_items_each_tile_is_one_program() -> None:
    assert items_of([(8000, 40), (3, 1)], 4).tolist() == [
        [0, 16, 0, 1, 0],
        [16, 16, 0, 1, 0],
        [32, 8, 0, 1, 0],
        [40, 1, 0, 1, 0],
    ]


def test_what_finds_no_room_is_walked() -> None:
    assert TILES.num_parts == 4032
    items = items_of([(100_000, 16), (70_000, 16), (1_000, 16)], 64)  # 391, 274 and 4 splits, 8 groups each
    programs = {row: count for row, _, _, count, _ in items.tolist()}
    assert programs[0] > 1
    assert programs[16] == 1
    assert programs[32] == 1  # as many splits as a program takes


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(0, 100),
    st.sampled_from([1, 16]),
)
def test_every_tile_has_all_of_its_programs(chunks: list[tuple[int, int]], spare: int, groups: int) -> None:
    tiles = ShortTiles(rows=64, tokens=16, groups=groups, head_dim=128)
    starts, counts = (np.array(column) for column in zip(*chunks, strict=True))
    most = tiles.count(counts) + spare
    items = items_of(chunks, most, tiles)
    assert len(items) <= most
    rows = np.concatenate([np.arange(row, row + count) for row, count, program, _, _ in items.tolist() if not program])
    assert sorted(rows.tolist()) == list(range(int(counts.sum())))
    position = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, starts + counts, strict=True)])
    used = []
    for row in {row for row, *_ in items.tolist()}:
        own = items[items[:, 0] == row]
        (count,), (programs,), (part,) = (set(own[:, column].tolist()) for column in (1, 3, 4))
        assert sorted(own[:, 2].tolist()) == list(range(programs))
        splits = -(-(int(position[row]) + count) // 256)
        assert programs <= splits
        if programs > 1:
            used.append((part, part + splits * groups))
    used.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(used))
    assert not used or used[-1][1] <= tiles.num_parts


@pytest.mark.parametrize(("head_dim", "parts"), [(64, 7943), (256, 2032)])
def test_parts_fill_128_mib(head_dim: int, parts: int) -> None:
    assert ShortTiles(64, 16, 8, head_dim).num_parts == parts
