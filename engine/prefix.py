"""The prefix cache: which block holds the KV of a given prefix.

Only full blocks are cached, named by the chain of `protocol.hashing`, so a name stands for all
tokens up to the block's end, the salt and the adapter. 128 bits of BLAKE2b need no comparison of
tokens on a hit. Owns the names; `engine.blocks` owns the blocks. Knows of names that are coming, too:
some request has begun to compute their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from engine.blocks import BlockPool

#: Priority, whether it is new, number of its arrival: the smaller goes first.
Order = tuple[int, bool, int]


class PrefixCache:
    """Two-way map of block hash and block over a pool of its own.

    Who computes a block is known by its place in the order of requests, which none shares.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._coming: dict[bytes, Order] = {}

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
        self._coming.pop(name, None)
        if name not in self._blocks and block not in self._hashes:
            self._blocks[name] = block
            self._hashes[block] = name
            self.pool.keep(block)

    def announce(self, names: Sequence[bytes], by: Order) -> None:
        """These blocks are coming, those that are not there and that nobody else has begun."""
        for name in names:
            if name not in self._blocks:
                self._coming.setdefault(name, by)

    def renounce(self, names: Sequence[bytes], by: Order) -> None:
        """They are not, if they were to come from this one."""
        for name in names:
            if self._coming.get(name) == by:
                del self._coming[name]

    @property
    def num_coming(self) -> int:
        return len(self._coming)

    def is_coming(self, name: bytes) -> bool:
        return name in self._coming

    def count_coming(self, names: Sequence[bytes], before: Order) -> int:
        """How many of the chain `names`, from its first on, come from requests that go first."""
        count = 0
        for name in names:
            by = self._coming.get(name)
            if by is None or by >= before:
                break
            count += 1
        return count

    def check_coming(self, running: Set[Order]) -> None:
        """Assert that what is coming has somebody to compute it, and is not there."""
        assert set(self._coming.values()) <= running, "a block is awaited that nobody computes"
        assert not self._coming.keys() & self._blocks.keys(), "a block is awaited that is there"

    def _forget(self, block: int) -> None:
        del self._blocks[self._hashes.pop(block)]
