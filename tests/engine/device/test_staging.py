from __future__ import annotations

import torch

from engine.device.staging import Layout, Staging

CPU = torch.device("cpu")


def test_columns_are_aligned_and_apart() -> None:
    spans, size = Layout(5, 3, 2, 1).offsets()
    assert [end - begin for begin, end in spans] == [6, 5, 5, 5, 3, 3, 3, 3, 3, 3, 3, 4, 5]
    assert all(begin % 4 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, [*spans[1:], (size, size)], strict=True))


def test_what_is_filled_arrives() -> None:
    layout = Layout(3, 2, 1)
    staging = Staging(Layout(8, 4, 4), depth=2, device=CPU)
    host = staging.host(layout)
    host.ids[:] = [7, 8, 9]
    host.slots[:] = [1, 0]
    host.tiles[:] = [2, 1]
    staging.send(layout)
    device = staging.device(layout)
    assert device.ids.tolist() == [7, 8, 9]
    assert device.slots.tolist() == [1, 0]
    assert device.tiles.tolist() == [2, 1]
    assert device.seeds.view(torch.int64).tolist() == [0, 0]


def test_the_step_in_flight_keeps_its_buffer() -> None:
    layout = Layout(1, 1, 0)
    staging = Staging(layout, depth=2, device=CPU)
    first = staging.host(layout)
    first.ids[0] = 5
    second = staging.host(layout)
    second.ids[0] = 6
    assert first.ids[0] == 5
    third = staging.host(layout)
    assert third.ids[0] == 5  # the first one's buffer again
