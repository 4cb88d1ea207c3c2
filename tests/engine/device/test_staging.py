from __future__ import annotations

from array import array

import torch

from engine.device.staging import Layout, Staging

CPU = torch.device("cpu")


def test_columns_are_aligned_and_apart() -> None:
    spans, size = Layout(5, 3, 2, 1, 2).offsets()
    assert [end - begin for begin, end in spans] == [1, 6, 5, 5, 5, 3, 3, 3, 3, 3, 3, 3, 4, 5, 10, 0, 0]
    assert all(begin % 4 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, [*spans[1:], (size, size)], strict=True))


def test_what_is_filled_arrives() -> None:
    layout = Layout(3, 2, 1)
    staging = Staging(Layout(8, 4, 4), depth=2, device=CPU)
    host = staging.host(layout)
    host.ids[:] = array("i", [7, 8, 9])
    host.slots[:] = array("i", [1, 0])
    host.tiles[:] = array("i", [2, 1])
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


def test_changes_of_any_number_arrive_with_the_columns_of_any_layout() -> None:
    staging = Staging(Layout(8, 4, 4), max_changes=100, depth=2, device=CPU)
    for layout, num_changes in ((Layout(3, 2, 1), 3), (Layout(8, 4, 4), 100), (Layout(1, 1), 0)):
        host = staging.host(layout)
        host.ids[:], host.num_changes[0] = array("i", [num_changes]) * layout.num_tokens, num_changes
        host.changes[: 2 * num_changes] = array("i", range(2 * num_changes))
        staging.send(layout, num_changes)
        device = staging.device(layout)
        assert device.num_changes.tolist() == [num_changes]
        assert device.ids.tolist() == [num_changes] * layout.num_tokens
        assert device.changes[: 2 * num_changes].tolist() == [*range(2 * num_changes)]
