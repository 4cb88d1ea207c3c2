"""The chain of block hashes: what separates prefixes, and what must not."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("block_size", [4, 96, 2048])
def test_what_is_remembered_of_long_chains_is_what_a_first_look_gives(block_size):
    ids = list(range(4096 + block_size + 1))
    whole = hashes(ids, block_size=block_size)
    assert len(whole) == len(ids) // block_size
    by_blocks = [hashing.root()]
    for begin in range(0, len(whole) * block_size, block_size):
        by_blocks += hashing.chain(u32(ids[begin : begin + block_size]), block_size, by_blocks[-1])
    assert whole == by_blocks[1:] == hashes(ids, block_size=block_size)
    changed = hashes([*ids[:2060], 7, *ids[2061:]], block_size=block_size)
    assert [one == other for one, other in zip(whole, changed, strict=True)].count(True) == 2060 // block_size
    assert not set(whole) & set(hashes(ids, block_size=block_size, salt="s"))


def test_the_chain_is_the_same_in_every_process():
    code = (
        "from protocol import hashing; from protocol.messages import u32\n"
        "print([h.hex() for h in hashing.chain(u32(range(8)), 4, hashing.root('s'))])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == str([name.hex() for name in hashes(range(8), salt="s")])
