"""Who comes while another computes what it needs waits for that, and only then."""

import pytest

from protocol.messages import u32
from tests.engine.control import OWNER, Driver, alone, submit

PROMPT = bytes(range(150))


def computed(driver: Driver) -> int:
    """Positions of prompts and tokens that the steps so far have computed."""
    return sum(entry.count for plan in driver.plans for entry in plan.entries)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_comes_many_times_at_once_is_computed_once(depth):
    driver = Driver(max_num_batched_tokens=64, fake_depth=depth)
    messages = [submit(handle, PROMPT + bytes([handle]) * 5, max_tokens=3, seed=handle) for handle in range(4)]
    heard = [driver.add(message) for message in messages]
    stranger = driver.add(submit(9, b"y" * 10, max_tokens=1))
    driver.run()
    assert [h.entered[0].message.cached_tokens for h in heard] == [0, 144, 144, 144]
    assert computed(driver) == 155 + 3 * 11 + 4 * 2 + 10
    assert [u32(h.tokens) for h in heard] == [alone(message) for message in messages]
    assert stranger.tokens


def test_those_behind_who_share_nothing_go_ahead():
    driver = Driver(max_num_batched_tokens=200)
    driver.add(submit(1, PROMPT, max_tokens=3))
    waiting = driver.add(submit(2, PROMPT, max_tokens=3))
    stranger = driver.add(submit(3, b"y" * 10, max_tokens=3))
    driver.turn()
    assert (len(waiting.entered), len(stranger.entered)) == (0, 1)
    driver.turn()
    assert waiting.entered[0].message.cached_tokens == 144
    driver.run()


def test_who_has_less_than_half_in_common_begins_at_once():
    driver = Driver(max_num_batched_tokens=400)
    driver.add(submit(1, PROMPT, max_tokens=3))
    most = driver.add(submit(2, PROMPT[:70] + b"z" * 80, max_tokens=3))  # 64 of 150
    half = driver.add(submit(3, PROMPT[:80] + b"z" * 70, max_tokens=3))  # 80 of 150
    driver.turn()
    assert (len(most.entered), len(half.entered)) == (1, 0)
    driver.run()
    assert half.entered[0].message.cached_tokens == 80


def test_what_was_cached_before_does_not_count():
    driver = Driver(max_num_batched_tokens=64)
    driver.add(submit(1, PROMPT[:96], max_tokens=1))
    driver.run()
    driver.add(submit(2, PROMPT, max_tokens=3))
    waiting = driver.add(submit(3, PROMPT, max_tokens=3))  # of the 54 tokens to compute 48 are coming
    driver.run()
    assert waiting.entered[0].message.cached_tokens == 144


@pytest.mark.parametrize("end", ["abort", "preemption"])
def test_nobody_waits_for_what_is_not_coming_any_more(end):
    driver = Driver(max_num_batched_tokens=64)
    driver.add(submit(1, PROMPT, max_tokens=3))
    message = submit(2, PROMPT, max_tokens=3)
    waiting = driver.add(message)
    driver.turn()
    assert not waiting.entered
    if end == "abort":
        driver.scheduler.abort(OWNER, 1)
        driver.hear(driver.scheduler.take_events())
    else:
        driver.scheduler._preempt(driver.scheduler._running[0])
    driver.run()
    assert waiting.entered[0].message.cached_tokens == (64 if end == "abort" else 144)
    assert u32(waiting.tokens) == alone(message)


def test_who_goes_first_waits_for_nobody():
    driver = Driver(max_num_batched_tokens=100)
    driver.add(submit(1, PROMPT, max_tokens=3))
    driver.turn()
    urgent = driver.add(submit(2, PROMPT, max_tokens=3, priority=-1))
    driver.turn()
    assert urgent.entered
    driver.run()


def test_without_a_prefix_cache_there_is_nothing_to_wait_for():
    driver = Driver(max_num_batched_tokens=400, enable_prefix_caching=False)
    heard = [driver.add(submit(handle, PROMPT, max_tokens=1)) for handle in range(2)]
    driver.turn()
    assert all(h.entered for h in heard)
    driver.run()


def test_siblings_do_not_wait_for_a_leader_that_is_cached_beyond_its_prompt():
    """One that was moved here with what it had generated: its prompt is there when it enters."""
    driver = Driver()
    told = PROMPT[:64]
    known = driver.add(submit(1, told, max_tokens=40))
    driver.run()
    leader = submit(2, told, max_tokens=300, generated_ids=u32(known.tokens[:33]), group=5, leader=True)
    driver.add(leader)
    sibling = driver.add(submit(3, told, max_tokens=2, group=5))
    for _ in range(4):
        driver.turn()
    assert sibling.entered
    driver.run()


def test_siblings_wait_for_the_leaders_prompt_blocks_and_then_find_them():
    driver = Driver(max_num_batched_tokens=64)
    driver.add(submit(1, b"x" * 150, max_tokens=4, group=9, leader=True))
    siblings = [driver.add(submit(handle, b"x" * 150, max_tokens=4, group=9, seed=handle)) for handle in (2, 3)]
    stranger = driver.add(submit(4, b"y" * 10, max_tokens=1))
    driver.turn()
    assert [len(s.entered) for s in siblings] == [0, 0]
    driver.run()
    assert [s.entered[0].message.cached_tokens for s in siblings] == [144, 144]
    # The stranger behind them did not wait: the third step had budget left.
    assert stranger.entered
    assert len(driver.plans) == 7


@pytest.mark.parametrize("end", ["abort", "never came", "was lost"])
def test_a_leader_that_is_gone_frees_its_siblings(end):
    driver = Driver(max_num_batched_tokens=64)
    if end != "never came":
        driver.add(submit(1, b"x" * 150, max_tokens=4, group=9, leader=True))
    sibling = driver.add(submit(2, b"x" * 150, max_tokens=1, group=9), owner=2 if end == "was lost" else OWNER)
    driver.turn()
    if end == "abort":
        driver.scheduler.abort(OWNER, 1)
    if end == "was lost":
        driver.scheduler.abort_owner(OWNER)
    driver.hear(driver.scheduler.take_events())
    driver.run()
    assert len(sibling.tokens) == 1


def test_groups_of_other_gateways_are_other_groups():
    driver = Driver(max_num_batched_tokens=64)
    driver.add(submit(1, b"x" * 150, max_tokens=4, group=9, leader=True))
    other = driver.add(submit(1, b"y" * 10, max_tokens=1, group=9), owner=2)
    driver.turn()
    driver.turn()
    driver.turn()
    assert other.entered
    driver.run()
