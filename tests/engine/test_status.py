"""LongestStep: the longest of the last five minutes."""

from __future__ import annotations

from engine.status import SLICE_S, WINDOW_S, LongestStep


def test_the_longest_is_remembered_for_five_minutes():
    longest = LongestStep()
    assert longest.value(0.0) == 0.0
    longest.add(0.0, 2.0)
    longest.add(1.0, 0.5)
    longest.add(100.0, 1.0)
    assert longest.value(100.0) == 2.0
    assert longest.value(WINDOW_S) == 2.0
    assert longest.value(WINDOW_S + SLICE_S) == 1.0
    assert longest.value(10 * WINDOW_S) == 0.0


def test_memory_is_bounded():
    longest = LongestStep()
    for tenth in range(20_000):
        longest.add(tenth / 10, 0.1)
        longest.value(tenth / 10)
    assert len(longest._slices) <= WINDOW_S / SLICE_S + 2
