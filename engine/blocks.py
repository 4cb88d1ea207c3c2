"""The pool of KV blocks: who may write which, and which are worth keeping when nobody does.

A block is free, cached (it holds a prefix that may be asked for again; nobody reads it now) or
owned (one or more requests hold it). Free + cached + owned is always the size of the pool;
`check` proves it. All operations take constant time per block. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Reference counts, the free list, and the cached blocks from least to most recently released.

    `on_evict` is called with a cached block just before it is handed out for new content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}.")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._keep = [False] * num_blocks
        # Popped from the end, so that block 0 goes out first.
        self._free = list(range(num_blocks - 1, -1, -1))
        # A dict keeps insertion order and deletes from the middle in constant time: an LRU list.
        self._cached: dict[int, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds, so that `acquire` takes them from `num_available`."""
        return [self._refs[block] for block in blocks].count(0)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each: free ones, then the longest cached ones.

        The caller has made sure that `num_available` is at least `count`.
        """
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._keep[block] = False
                self._on_evict(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of `blocks`, cached ones or ones that other requests hold."""
        refs, cached = self._refs, self._cached
        for block in blocks:
            if refs[block] == 0:
                del cached[block]
            refs[block] += 1

    def keep(self, block: int) -> None:
        """From now on the block is cached, not freed, when its last reference goes."""
        assert self._refs[block] > 0, f"block {block} is owned by nobody"
        self._keep[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each, last block first.

        So the tail of a sequence is evicted before its head, without which it could not be found.
        """
        refs, keep, cached, free = self._refs, self._keep, self._cached, self._free
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is released once too often"
            refs[block] -= 1
            if refs[block] == 0:
                if keep[block]:
                    cached[block] = None
                else:
                    free.append(block)

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that the blocks of all requests (`owned`), the free and the cached ones are all there are."""
        refs = Counter(block for blocks in owned for block in blocks)
        assert all(self._refs[block] == refs[block] for block in range(self.num_blocks)), "reference counts differ"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        assert not (free | cached) & refs.keys(), "an owned block is free or cached"
        assert len(free) + len(cached) + len(refs) == self.num_blocks, "a block is lost"
        assert all(self._keep[block] for block in cached), "a block without a name is cached"
        assert not any(self._keep[block] for block in free), "a free block has a name"
