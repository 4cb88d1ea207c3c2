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
    layouts = [Layout(size, 16, num_items=size // 32 + 16 + SPARE_ITEMS) for size in sizes]
    assert chunk_layouts(16, 300, 32, 64) == layouts
    layouts = [layout for layout in chunk_layouts(256, 512, 32, 64) if not layout.num_single]
    assert [layout.num_sampled for layout in layouts] == [16, 32, 64, 64, 64, 64]
    assert layouts[-1] == Layout(512, 64, num_items=16 + 64 + SPARE_ITEMS)
    assert chunk_layouts(16, 15, 32, 64) == []


def test_graphs_of_more_tokens_have_tiles_of_long_chunks() -> None:
    layouts = [layout for layout in chunk_layouts(256, 8192, 16, 32) if not layout.num_single][6:]
    assert [layout.num_tokens for layout in layouts] == [640, 768, 896, 1024]
    assert [layout.num_tiles for layout in layouts] == [36, 40, 44, 48]
    assert layouts[-1] == Layout(1024, 64, num_tiles=48, num_items=0, num_last_items=96)
    layouts = [layout for layout in chunk_layouts(8, 900, 16, 128) if not layout.num_single]
    assert layouts[-1] == Layout(896, 8, num_tiles=23, num_items=0, num_last_items=40)


def test_chunks_have_graphs_beside_more_single_tokens_than_the_others_sample() -> None:
    layouts = [layout for layout in chunk_layouts(300, 8192, 16, 32) if layout.num_single]
    assert [layout.num_tokens for layout in layouts] == [128, 192, 256, 384, 512, 640, 768]
    assert [layout.num_single for layout in layouts] == [128, 192, 256, 256, 256, 256, 256]
    assert layouts[-1] == Layout(768, 256, num_tiles=40, num_items=32, num_last_items=32, num_single=256)
    assert [x.num_tokens for x in chunk_layouts(16, 8192, 16, 32) if x.num_single] == [640, 768]  # 512 sample 16 too
    assert not [x for x in chunk_layouts(1, 8192, 16, 32) if x.num_single]


def test_graphs_in_which_all_is_alike_come_first_and_then_smaller_ones() -> None:
    layouts = chunk_layouts(300, 8192, 16, 32)
    assert layouts == sorted(layouts, key=lambda layout: (layout.num_single > 0, layout.num_tokens))
