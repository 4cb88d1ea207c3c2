"""Long work on the event loop, cut into slices."""

from __future__ import annotations

import asyncio
import time

#: For so long work goes on before other callbacks of the event loop get their turn.
SLICE_S = 0.004


class Slices:
    """Begun with the work; `turn` is awaited between its parts."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def turn(self) -> None:
        """Let the others have theirs if this slice is over."""
        if time.perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S
