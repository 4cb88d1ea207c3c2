"""The chain of block hashes: what separates prefixes, and what must not."""

from __future__ import annotations

import subprocess
import sys

from protocol import hashing
from protocol.messages import u32


def hashes(ids, *, block_size=4, salt="", adapter=None):
    return list(hashing.chain(u32(ids), block_size, hashing.root(salt, adapter)))


def test_only_full_blocks_are_named():
    assert [len(hashes(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(name) == hashing.HASH_BYTES for name in hashes(range(8)))


def test_a_block_is_named_by_everything_before_it():
    one, two = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != two[1]
    assert hashes([1, 2, 3, 4, 0, 0, 0, 0])[0] == one[0]


def test_salt_and_adapter_separate():
    ids = range(8)
    names = {hashes(ids, salt=s, adapter=a)[0] for s, a in (("", None), ("a", None), ("b", None), ("", "a"))}
    assert len(names) == 4
    assert hashing.root("ab", "c") != hashing.root("a", "bc")
    assert hashing.root("\ud83d") != hashing.root("")


def test_the_chain_is_the_same_in_every_process():
    code = (
        "from protocol import hashing; from protocol.messages import u32\n"
        "print([h.hex() for h in hashing.chain(u32(range(8)), 4, hashing.root('s'))])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == str([name.hex() for name in hashes(range(8), salt="s")])
