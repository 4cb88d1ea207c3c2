"""How the tokens of a step are shared out among decodes and prompts, and in which order they are planned."""

from __future__ import annotations

from engine.plan import StepPlan
from protocol.messages import u32
from tests.engine.control import Driver, alone, submit


def shapes(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(start, count, sample) of each entry."""
    return [(entry.start, entry.count, entry.sample) for entry in plan.entries]


def test_a_long_prompt_is_taken_in_chunks_and_samples_with_the_last():
    driver = Driver(max_num_batched_tokens=64)
    driver.add(submit(1, b"x" * 150, max_tokens=2))
    driver.run()
    assert [shapes(plan) for plan in driver.plans] == [
        [(0, 64, False)],
        [(64, 64, False)],
        [(128, 22, True)],
        [(150, 1, True)],
    ]


def test_decodes_come_before_prefill_chunks_in_every_step():
    driver = Driver(max_num_batched_tokens=64, enable_prefix_caching=False)
    driver.add(submit(1, b"short", max_tokens=6))
    driver.turn()
    driver.add(submit(2, b"x" * 150, max_tokens=1))
    driver.turn()
    driver.turn()
    assert shapes(driver.plans[1]) == [(5, 1, True), (0, 63, False)]
    assert shapes(driver.plans[2]) == [(6, 1, True), (63, 63, False)]


def test_decodes_are_planned_longest_context_first():
    driver = Driver(enable_prefix_caching=False)
    heard = {number: driver.add(submit(number, b"x" * number, max_tokens=3)) for number in (5, 40, 9)}
    driver.run()
    assert [shapes(plan) for plan in driver.plans[1:]] == [
        [(40, 1, True), (9, 1, True), (5, 1, True)],
        [(41, 1, True), (10, 1, True), (6, 1, True)],
    ]
    assert all(u32(heard[n].tokens) == alone(submit(n, b"x" * n, max_tokens=3)) for n in heard)


def test_prompts_beside_decodes_are_taken_in_smaller_chunks():
    """Those of one running, and of newcomers, together with the decodes; the whole budget when nothing decodes."""
    driver = Driver(max_num_batched_tokens=64, max_num_prefill_tokens=20, enable_prefix_caching=False)
    driver.add(submit(1, b"x" * 70, max_tokens=4))
    driver.turn()
    driver.turn()
    driver.add(submit(2, b"y" * 25, max_tokens=1))
    driver.add(submit(3, b"z" * 30, max_tokens=1))
    driver.run()
    assert [shapes(plan) for plan in driver.plans] == [
        [(0, 64, False)],
        [(64, 6, True)],
        [(70, 1, True), (0, 19, False)],
        [(71, 1, True), (19, 6, True), (0, 13, False)],
        [(72, 1, True), (13, 17, True)],
    ]


def test_half_of_the_bound_is_for_prompts_however_many_decode():
    driver = Driver(max_num_batched_tokens=64, max_num_prefill_tokens=5, enable_prefix_caching=False)
    for handle in range(4):
        driver.add(submit(handle, b"x", max_tokens=4))
    driver.turn()
    driver.add(submit(9, b"y" * 8, max_tokens=1))
    driver.run()
    assert [shapes(plan)[4:] for plan in driver.plans[:5]] == [[], [(0, 3, False)], [(3, 3, False)], [(6, 2, True)]]
