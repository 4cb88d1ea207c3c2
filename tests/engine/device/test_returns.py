"""The way back of sampled ids, with a CPU in a GPU's place."""

from __future__ import annotations

import pytest
import torch

from engine.device.returns import Returns


class _Event:
    def __init__(self) -> None:
        self.marked: list[object] = []
        self.waits = 0

    def record(self, stream: object) -> None:
        self.marked.append(stream)

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> _Event:
    event = _Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return event


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_first_of_what_was_sent_come_back_after_the_event(event: _Event) -> None:
    returns = Returns(4, torch.device("cpu"))
    returns.send(ids(7, 0, 2**31 - 1, 9))
    assert event.marked == ["stream of cpu"]
    found, negative = returns.wait(3)
    assert (found.typecode, found.tolist(), negative, event.waits) == ("I", [7, 0, 2**31 - 1], [], 1)
    returns.send(ids(5))
    assert returns.wait(1)[0].tolist() == [5]
    assert found.tolist() == [7, 0, 2**31 - 1]  # a copy


def test_rows_with_negative_ids_are_named_unless_they_are_padding(event: _Event) -> None:
    returns = Returns(4, torch.device("cpu"))
    returns.send(ids(-2, 3, -1, -1))
    found, negative = returns.wait(3)
    assert (found.tolist(), negative) == ([2**32 - 2, 3, 2**32 - 1], [0, 2])


def test_a_step_that_samples_nothing_is_waited_for_too(event: _Event) -> None:
    returns = Returns(4, torch.device("cpu"))
    returns.send(ids())
    assert returns.wait(0)[0].tolist() == []
    assert (len(event.marked), event.waits) == (1, 1)
