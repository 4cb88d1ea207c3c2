"""A line for each step that is sent, none for what has no token."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import orjson

from engine.step_log import StepLog
from protocol.messages import U16, Finished, FinishReason, Step, u32


def test_lines_have_the_time_of_sending_and_are_there_before_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"{}\n")  # of an engine's life before
    log = StepLog(path)
    began = time.monotonic_ns()
    finished = Finished(3, FinishReason.LENGTH, 1, 0, 5)
    log.sending([(1, Step(7, u32([3, 4]), u32([0, 0]), array(U16, [1, 2]), u32([9, 9, 9]), None)), (1, finished)])
    log.sending([(1, finished)])
    (_, line) = map(orjson.loads, path.read_bytes().splitlines())
    assert began <= line.pop("monotonic_ns") <= time.monotonic_ns()
    assert line == {"step": 7, "num_sampled": 3}
    log.close()
