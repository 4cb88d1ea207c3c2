"""BlockPool: who gets which block, what is kept, what is evicted first."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool


def pool(num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0, lambda block: None)


def test_blocks_go_out_once_and_come_back():
    blocks, evicted = pool(4)
    first, second = blocks.allocate(3), blocks.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert blocks.num_available == 0
    blocks.check([first, second])
    blocks.release(first)
    blocks.release(second)
    assert blocks.num_available == 4
    assert blocks.num_cached == 0
    assert evicted == []
    blocks.check([])


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    blocks, _ = pool(2)
    (block,) = blocks.allocate(1)
    assert blocks.acquire([block], leaving=1)
    blocks.release([block])
    assert blocks.num_available == 1
    blocks.release([block])
    assert blocks.num_available == 2


def test_kept_blocks_are_cached_and_the_tail_of_a_sequence_is_evicted_first():
    blocks, evicted = pool(4)
    held = blocks.allocate(3)
    for block in held:
        blocks.keep(block)
    blocks.release(held)
    assert blocks.num_cached == 3
    assert blocks.num_available == 4
    blocks.check([])
    blocks.allocate(1)
    assert evicted == []  # a free block goes first
    blocks.allocate(2)
    assert evicted == [held[2], held[1]]


def test_a_cached_block_that_is_acquired_cannot_be_evicted():
    blocks, evicted = pool(2)
    held = blocks.allocate(2)
    for block in held:
        blocks.keep(block)
    blocks.release(held)
    assert blocks.acquire([held[1]], leaving=1)
    assert blocks.num_available == 1
    assert blocks.allocate(1) == [held[0]]
    assert evicted == [held[0]]
    blocks.check([[held[1]], [held[0]]])


def test_an_evicted_block_is_freed_not_cached_afterwards():
    blocks, _ = pool(1)
    (block,) = blocks.allocate(1)
    blocks.keep(block)
    blocks.release([block])
    assert blocks.allocate(1) == [block]
    blocks.release([block])
    assert blocks.num_cached == 0
    blocks.check([])


def test_check_finds_a_lost_block_and_one_held_by_nobody_known():
    blocks, _ = pool(3)
    held = blocks.allocate(2)
    with pytest.raises(AssertionError, match="reference counts differ"):
        blocks.check([])
    with pytest.raises(AssertionError, match="reference counts differ"):
        blocks.check([held, held])
    blocks._free.pop()
    with pytest.raises(AssertionError, match="a block is lost"):
        blocks.check([held])


def test_releasing_once_too_often_is_found():
    blocks, _ = pool(1)
    held = blocks.allocate(1)
    blocks.release(held)
    with pytest.raises(AssertionError, match="once too often"):
        blocks.release(held)


def test_nothing_is_acquired_where_too_few_would_be_left():
    blocks, _ = pool(4)
    held = blocks.allocate(2)
    for block in held:
        blocks.keep(block)
    blocks.release(held)
    assert not blocks.acquire(held, leaving=3)
    assert (blocks.num_available, blocks.num_cached) == (4, 2)
    assert blocks.acquire(held, leaving=2)
    assert (blocks.num_available, blocks.num_cached) == (2, 0)
    assert blocks.acquire(held, leaving=2)  # whom somebody holds take nothing from what is available
    blocks.check([held, held])


def test_the_longest_released_goes_first_whoever_held_it_in_between():
    blocks, evicted = pool(3)
    held = blocks.allocate(3)
    for block in held:
        blocks.keep(block)
        blocks.release([block])
    blocks.acquire(held[:2], leaving=0)
    blocks.release(held[:1])
    assert blocks.allocate(2) == [held[2], held[0]]
    blocks.release(held[1:2])
    assert blocks.allocate(1) == [held[1]]
    assert evicted == [held[2], held[0], held[1]]
    blocks.check([held])
