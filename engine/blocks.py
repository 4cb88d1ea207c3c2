"""The pool of KV blocks: who may write which, and which are worth keeping when nobody does.

A block is free, cached (it holds a prefix that may be asked for again; nobody reads it now) or
owned (one or more requests hold it). Free + cached + owned is always the size of the pool;
`check` proves it. All operations take constant time per block, on average, and few steps: a request may come with
thousands that are cold in the processor's caches, and wait for them. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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
        # Cached blocks, the longest released first, among owned ones: `acquire` leaves a block where it is, eviction
        # passes over it, `release` moves it to the end.
        self._released: OrderedDict[int, None] = OrderedDict()
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each: free ones, then the longest cached ones.

        The caller has made sure that `num_available` is at least `count`.
        """
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        """The longest cached block, without a name."""
        refs, released = self._refs, self._released
        while refs[block := released.popitem(last=False)[0]]:
            pass
        self._num_cached -= 1
        self._keep[block] = False
        self._on_evict(block)
        return block

    def acquire(self, blocks: Sequence[int], leaving: int) -> bool:
        """Add a reference to each of `blocks`, cached ones or ones that other requests hold.

        False, and none is added, if fewer than `leaving` would be available then.
        """
        refs = self._refs
        num_cached = [refs[block] for block in blocks].count(0)
        if self.num_available - num_cached < leaving:
            return False
        self._num_cached -= num_cached
        for block in blocks:
            refs[block] += 1
        return True

    def keep(self, block: int) -> None:
        """From now on the block is cached, not freed, when its last reference goes."""
        assert self._refs[block] > 0, f"block {block} is owned by nobody"
        self._keep[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each, last block first.

        So the tail of a sequence is evicted before its head, without which it could not be found.
        """
        refs, keep, released, free = self._refs, self._keep, self._released, self._free
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is released once too often"
            refs[block] -= 1
            if refs[block] == 0:
                if keep[block]:
                    released[block] = None
                    released.move_to_end(block)
                    self._num_cached += 1
                else:
                    free.append(block)

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that the blocks of all requests (`owned`), the free and the cached ones are all there are."""
        refs = Counter(block for blocks in owned for block in blocks)
        assert all(self._refs[block] == refs[block] for block in range(self.num_blocks)), "reference counts differ"
        free, cached = set(self._free), {block for block in self._released if not self._refs[block]}
        assert len(cached) == self._num_cached, "cached blocks are miscounted"
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._released.keys(), "a block is both free and cached"
        assert not (free | cached) & refs.keys(), "an owned block is free or cached"
        assert len(free) + len(cached) + len(refs) == self.num_blocks, "a block is lost"
        assert all(self._keep[block] for block in cached), "a block without a name is cached"
        assert not any(self._keep[block] for block in free), "a free block has a name"
