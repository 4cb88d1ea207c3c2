from __future__ import annotations

import pytest

from engine.device.graphs import chunk_layouts, decode_layouts
from engine.device.staging import Layout


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (24, [1, 2, 4, 8, 16, 24]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]),
        (400, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256, 320, 384, 400]),
    ],
)
def test_decodes_of_any_number_have_a_graph_with_little_padding(most: int, sizes: list[int]) -> None:
    assert decode_layouts(most) == [Layout(size, size, 0) for size in sizes]


def test_chunks_have_graphs_as_far_as_steps_reach() -> None:
    assert chunk_layouts(16, 300, 32) == [Layout(64, 16, 18), Layout(128, 16, 20), Layout(256, 16, 24)]
    assert chunk_layouts(256, 512, 32)[-1] == Layout(512, 64, 80)
    assert chunk_layouts(16, 32, 32) == []
