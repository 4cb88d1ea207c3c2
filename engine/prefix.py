"""The prefix cache: which block holds the KV of a given prefix.

Only full blocks are cached, named by the chain of `protocol.hashing`, so a name stands for all
tokens up to the block's end, the salt and the adapter. 128 bits of BLAKE2b need no comparison of
tokens on a hit. Owns the names; `engine.blocks` owns the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks import BlockPool


class PrefixCache:
    """Two-way map of block hash and block over a pool of its own."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of the chain `hashes`, not yet acquired."""
        blocks = []
        for name in hashes:
            block = self._blocks.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: int) -> None:
        """Name a block whose content is complete. A second block of the same content stays nameless."""
        if name not in self._blocks and block not in self._hashes:
            self._blocks[name] = block
            self._hashes[block] = name
            self.pool.keep(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._hashes.pop(block)]
