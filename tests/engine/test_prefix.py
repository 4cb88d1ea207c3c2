"""PrefixCache: names of blocks, and that a name stands for all that comes before."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

from engine.prefix import PrefixCache
from protocol import hashing
from protocol.messages import u32


def names(ids: list[int], salt: str = "", adapter: str | None = None) -> list[bytes]:
    return list(hashing.chain(u32(ids), 16, hashing.root(salt, adapter)))


def filled(ids: list[int]) -> tuple[PrefixCache, list[int]]:
    cache = PrefixCache(8)
    blocks = cache.pool.allocate(len(ids) // 16)
    for name, block in zip(names(ids), blocks, strict=True):
        cache.insert(name, block)
    return cache, blocks


def test_the_longest_cached_prefix_is_found():
    cache, blocks = filled([1] * 48)
    assert cache.match(names([1] * 48)) == blocks
    assert cache.match(names([1] * 32 + [2] * 16)) == blocks[:2]
    assert cache.match(names([2] * 16 + [1] * 32)) == []


def test_equal_tokens_after_another_prefix_are_another_block():
    cache, _ = filled([1] * 16 + [7] * 16)
    assert cache.match(names([2] * 16 + [7] * 16)[1:]) == []


def test_salt_and_adapter_separate():
    cache, blocks = filled([1] * 16)
    assert cache.match(names([1] * 16)) == blocks
    assert cache.match(names([1] * 16, salt="a")) == []
    assert cache.match(names([1] * 16, adapter="a")) == []


def test_a_second_block_of_the_same_content_stays_nameless():
    cache, blocks = filled([1] * 16)
    (twin,) = cache.pool.allocate(1)
    cache.insert(names([1] * 16)[0], twin)
    assert cache.match(names([1] * 16)) == blocks
    cache.pool.release([twin])
    assert cache.pool.num_cached == 0


def test_an_evicted_block_loses_its_name_and_its_children_are_unreachable():
    cache, blocks = filled([1] * 48)
    cache.pool.release([*blocks[1:], blocks[0]])  # the head is released first, so it is the oldest
    cache.pool.allocate(cache.pool.num_available - 2)
    assert cache.match(names([1] * 48)) == []


def test_names_are_the_same_in_every_process():
    program = (
        "from protocol import hashing; from protocol.messages import u32;"
        "print(*[n.hex() for n in hashing.chain(u32(range(64)), 16, hashing.root('s', 'a'))])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    chain = islice(hashing.chain(u32(range(64)), 16, hashing.root("s", "a")), 4)
    assert found == {" ".join(name.hex() for name in chain) + "\n"}
