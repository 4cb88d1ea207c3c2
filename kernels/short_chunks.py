"""How short chunks are divided on a GPU: tiles of few queries whose contexts several programs share.

A chunk of a dozen tokens behind thousands that are cached is one tile; one program alone would walk the whole
context (H200: 0.29 ms a layer for 8,192 positions). It decides what runs together, never a bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.attention import SPLIT

#: Columns of an item, int32.
ITEM_COLUMNS = 5

#: First row, number of tokens, and the position after the last.
Chunk = tuple[int, int, int]

#: Memory for the results of splits, which the program that comes last joins.
PARTS_BYTES = 2**27


@dataclass(frozen=True, slots=True)
class ShortTiles:
    """`rows` of a product a tile, which are `tokens` of one sequence by some heads; `groups` of heads are apart."""

    rows: int
    tokens: int
    groups: int
    head_dim: int

    @property
    def num_parts(self) -> int:
        """Splits of one tile and group whose results find room: `rows` sums, largest scores and outputs in float32."""
        return PARTS_BYTES // (4 * self.rows * (self.head_dim + 2))

    def count(self, counts: Sequence[int]) -> int:
        """Tiles of chunks of so many tokens."""
        return sum([-(-count // self.tokens) for count in counts])

    def items(self, chunks: Sequence[Chunk], most: int) -> array[int]:
        """At most `most` items, `most` being at least `count`: each first row, rows, program, programs, first part.

        The programs of a tile take every so manieth split of its context; where there is one, it needs no parts.
        """
        tiles = [
            (begin + first, min(self.tokens, count - first), end - count + min(first + self.tokens, count))
            for begin, count, end in chunks
            for first in range(0, count, self.tokens)
        ]
        splits = [-(-end // SPLIT) for _, _, end in tiles]
        spare = most - len(tiles)
        each = max(1, -(-sum(splits) // spare)) if spare > 0 else max(splits, default=1)  # splits of a program
        items = array("i")
        part = 0
        # The longest contexts first: they have most to gain from the parts there are, and most to do.
        for place in sorted(range(len(tiles)), key=lambda place: -splits[place]):
            row, num_rows, _ = tiles[place]
            programs, needed = -(-splits[place] // each), splits[place] * self.groups
            if programs == 1 or part + needed > self.num_parts:
                items.extend((row, num_rows, 0, 1, 0))
                continue
            for program in range(programs):
                items.extend((row, num_rows, program, programs, part))
            part += needed
        return items
