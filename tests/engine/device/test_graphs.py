from __future__ import annotations

import pytest

from engine.device.graphs import SPARE_ITEMS, chunk_layouts, decode_layouts
from engine.device.staging import Layout


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (24, [1, 2, 4, 8, 16, 24]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
        (400, [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), 256, 320, 384, 400]),
    ],
)
def test_decodes_of_any_number_have_a_graph_with_little_padding(most: int, sizes: list[int]) -> None:
    assert decode_layouts(most) == [Layout(size, size, 0) for size in sizes]


def test_chunks_have_graphs_as_far_as_steps_reach() -> None:
    sizes = (16, 32, 64, 128, 256)
    assert chunk_layouts(16, 300, 32) == [Layout(size, 16, num_items=size // 32 + 16 + SPARE_ITEMS) for size in sizes]
    assert [layout.num_sampled for layout in chunk_layouts(256, 512, 32)] == [16, 32, 64, 64, 64, 64]
    assert chunk_layouts(256, 512, 32)[-1] == Layout(512, 64, num_items=16 + 64 + SPARE_ITEMS)
    assert chunk_layouts(16, 15, 32) == []
