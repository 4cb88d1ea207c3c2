from __future__ import annotations

import asyncio
import time

from gateway.slices import SLICE_S, Slices


async def test_others_have_their_turn_once_a_slice_is_over() -> None:
    turns: list[float] = []

    async def other() -> None:
        while True:
            turns.append(time.perf_counter())
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    slices = Slices()
    started = time.perf_counter()
    while time.perf_counter() < started + 10 * SLICE_S:
        await slices.turn()
    task.cancel()
    assert 5 <= len(turns) <= 11
