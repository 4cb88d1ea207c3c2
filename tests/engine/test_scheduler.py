"""Scheduler behaviours by name, over the fake runner; see test_scheduler_properties for the invariants."""

from __future__ import annotations

import pytest

from engine.plan import StepResult
from protocol.messages import ErrorCode, FinishReason, Submit, u32
from tests.engine.control import OWNER, Driver, Heard, alone, submit

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def test_no_more_requests_run_than_max_num_seqs():
    driver = Driver(max_num_seqs=2)
    for handle in range(5):
        driver.add(submit(handle, max_tokens=3))
    while driver.turn():
        assert driver.scheduler.num_running <= 2
    assert all(len(plan.entries) <= 2 for plan in driver.plans)
    assert {entry.slot for plan in driver.plans for entry in plan.entries} == {0, 1}


def entered(driver: Driver) -> str:
    """The first letters of prompts, in the order in which they got a slot."""
    return "".join(chr(state.prompt_ids[0]) for plan in driver.plans for state in plan.entered)


def one_after_another(driver: Driver, *messages: Submit) -> list[Heard]:
    """Each Submit after the end of the one before."""
    heard = []
    for message in messages:
        heard.append(driver.add(message))
        driver.run()
    return heard


def test_lower_priority_values_go_first_then_resumed_then_the_order_of_arrival():
    driver = Driver(max_num_seqs=1)
    driver.add(submit(0, b"0", max_tokens=2))
    driver.turn()
    driver.add(submit(1, b"1", max_tokens=1, priority=1))
    driver.add(submit(2, b"2", max_tokens=1))
    driver.add(submit(3, b"3", max_tokens=1))
    driver.add(submit(4, b"4", max_tokens=2, resume=True, generated_ids=alone(submit(4, b"4", max_tokens=1))))
    driver.add(submit(5, b"5", max_tokens=1, priority=-1))
    driver.run()
    assert entered(driver) == "054231"


@DEPTHS
def test_a_prefix_hit_is_counted_and_covers_all_but_the_last_known_token(depth):
    driver = Driver(fake_depth=depth)
    driver.add(submit(1, b"x" * 48, max_tokens=1))
    driver.run()
    driver.add(submit(2, b"x" * 48, max_tokens=1))
    driver.add(submit(3, b"x" * 49, max_tokens=1))
    driver.run()
    second, third = driver.heard[OWNER, 2], driver.heard[OWNER, 3]
    assert [h.entered[0].message.cached_tokens for h in (second, third)] == [47, 48]
    assert [h.finished[0].num_cached for h in (second, third)] == [47, 48]
    assert driver.plans[-1].entries[-1].start == 48
    totals = driver.scheduler.counts.totals()
    assert (totals.prompt, totals.prefix_queries, totals.prefix_hits) == (145, 145, 95)


@DEPTHS
def test_the_last_token_is_computed_into_a_block_that_another_request_reads(depth):
    driver = Driver(fake_depth=depth)
    first = driver.add(submit(1, b"x" * 48, max_tokens=20))
    driver.turn()
    driver.turn()
    second = driver.add(submit(2, b"x" * 48, max_tokens=20))
    driver.run()
    assert second.entered[0].message.cached_tokens == 47
    entry = next(entry for plan in driver.plans[1:] for entry in plan.entries if entry.slot and entry.new_blocks)
    assert (entry.start, entry.count, entry.new_blocks) == (47, 1, driver.plans[0].entries[0].new_blocks)
    for number, heard in ((1, first), (2, second)):
        assert heard.tokens == list(alone(submit(number, b"x" * 48, max_tokens=20)))


def test_generated_tokens_are_cached_too():
    driver = Driver()
    first = driver.add(submit(1, b"x" * 8, max_tokens=41))
    driver.run()
    second = driver.add(submit(2, b"x" * 8 + bytes(first.tokens[:39]), max_tokens=1))
    driver.run()
    assert second.entered[0].message.cached_tokens == 32


def test_salts_do_not_share():
    driver = Driver()
    heard = one_after_another(driver, *(submit(i, b"x" * 64, max_tokens=4, salt=salt) for i, salt in enumerate("aab")))
    assert [h.entered[0].message.cached_tokens for h in heard] == [0, 63, 0]
    assert heard[0].tokens == heard[1].tokens == heard[2].tokens


def test_without_prefix_caching_nothing_is_found():
    driver = Driver(enable_prefix_caching=False)
    driver.add(submit(1, b"x" * 64, max_tokens=1))
    driver.run()
    again = driver.add(submit(2, b"x" * 64, max_tokens=1))
    driver.run()
    assert again.entered[0].message.cached_tokens == 0


@DEPTHS
def test_preempted_requests_get_the_tokens_they_get_alone(depth):
    # Eight requests of five or six blocks at their longest; the pool holds three or four of them.
    driver = Driver(fake_depth=depth, fake_num_blocks=20, max_num_seqs=8)
    messages = [submit(i, b"prompt %d " % i * 3, max_tokens=50, seed=i) for i in range(8)]
    heard = [driver.add(message) for message in messages]
    driver.run()
    assert driver.scheduler.counts.preemptions > 0
    for message, h in zip(messages, heard, strict=True):
        assert u32(h.tokens) == alone(message)
        assert len(h.entered) == 1
        assert h.finished[0].reason is FinishReason.LENGTH
    assert driver.scheduler.num_free_blocks == 20


@DEPTHS
def test_a_preempted_request_enters_again_with_its_output_apart_from_its_prompt(depth):
    driver = Driver(fake_depth=depth, fake_num_blocks=9, max_num_seqs=3, enable_prefix_caching=False)
    for handle in (1, 2, 3):
        driver.add(submit(handle, b"%d" % handle * 30, max_tokens=60))
    driver.run()
    states = [state for plan in driver.plans for state in plan.entered if state.prompt_ids[0] == ord("3")]
    assert all(state.prompt_ids == u32([ord("3")] * 30) for state in states)
    lengths = [len(state.generated_ids) for state in states]
    assert len(lengths) >= 2
    assert lengths == sorted(set(lengths))
    tokens = u32(driver.heard[OWNER, 3].tokens)
    assert all(state.generated_ids == tokens[: len(state.generated_ids)] for state in states)


def test_the_newest_of_the_lowest_priority_is_preempted():
    driver = Driver(fake_num_blocks=9, max_num_seqs=3, enable_prefix_caching=False)
    driver.add(submit(1, b"1" * 30, max_tokens=60))
    driver.add(submit(2, b"2" * 30, max_tokens=60, priority=1))
    driver.add(submit(3, b"3" * 30, max_tokens=60))
    while not driver.scheduler.counts.preemptions:
        driver.turn()
    driver.turn()
    slots = {chr(state.prompt_ids[0]): state.slot for plan in driver.plans for state in plan.entered}
    assert {entry.slot for entry in driver.plans[-1].entries} == {slots["1"], slots["3"]}
    driver.run()
    assert [len(driver.heard[OWNER, handle].tokens) for handle in (1, 2, 3)] == [60, 60, 60]


def test_a_preempted_request_comes_back_before_new_work():
    driver = Driver(fake_num_blocks=9, max_num_seqs=3, enable_prefix_caching=False)
    for handle in (1, 2, 3):
        driver.add(submit(handle, b"%d" % handle * 30, max_tokens=60))
    while not driver.scheduler.counts.preemptions:
        driver.turn()
    driver.add(submit(4, b"4", max_tokens=1))
    driver.run()
    assert entered(driver) == "123234"


def test_abort_of_a_waiting_request_ends_it_at_once():
    driver = Driver(max_num_seqs=1)
    driver.add(submit(1, max_tokens=5))
    waiting = driver.add(submit(2, max_tokens=5))
    driver.turn()
    driver.scheduler.abort(OWNER, 2)
    driver.hear(driver.scheduler.take_events())
    assert [f.reason for f in waiting.finished] == [FinishReason.ABORT]
    driver.run()
    assert waiting.tokens == []
    assert driver.scheduler.counts.aborted == 1


def test_abort_with_two_steps_in_flight_keeps_the_blocks_until_the_last_has_committed():
    driver = Driver(fake_depth=2, fake_num_blocks=8)
    aborted = driver.add(submit(1, b"x" * 20, max_tokens=50))
    for _ in range(3):
        driver.turn()
    held = driver.scheduler.num_free_blocks
    driver.scheduler.abort(OWNER, 1)
    driver.hear(driver.scheduler.take_events())
    assert aborted.finished[0].reason is FinishReason.ABORT
    assert driver.scheduler.num_free_blocks == held < 8
    num_tokens = len(aborted.tokens)
    driver.run()
    assert len(aborted.tokens) == num_tokens
    assert driver.scheduler.num_free_blocks == 8


def test_a_handle_may_be_used_again_after_its_end_although_a_step_still_holds_the_old_request():
    driver = Driver(fake_depth=2)
    driver.add(submit(1, b"old", max_tokens=50))
    for _ in range(3):
        driver.turn()
    driver.scheduler.abort(OWNER, 1)
    driver.hear(driver.scheduler.take_events())
    message = submit(1, b"new", max_tokens=5)
    again = driver.add(message)
    driver.run()
    assert u32(again.tokens) == alone(message)


@DEPTHS
def test_the_token_planned_after_an_unforeseen_end_is_dropped(depth):
    free = alone(submit(1, b"x", max_tokens=20))
    stop = free[7]
    driver = Driver(fake_depth=depth)
    stopped = driver.add(submit(1, b"x", max_tokens=20, stop_token_ids=(stop,)))
    driver.run()
    expected = free[: free.index(stop) + 1]
    assert u32(stopped.tokens) == expected
    finished = stopped.finished[0]
    assert (finished.reason, finished.stop_id, finished.num_generated) == (FinishReason.STOP, stop, len(expected))


@DEPTHS
def test_an_end_by_length_is_foreseen(depth):
    driver = Driver(fake_depth=depth)
    driver.add(submit(1, b"x", max_tokens=4))
    driver.run()
    assert sum(entry.sample for plan in driver.plans for entry in plan.entries) == 4


@DEPTHS
def test_the_end_of_the_context_is_an_end_by_length(depth):
    driver = Driver(fake_depth=depth, max_model_len=40)
    heard = driver.add(submit(1, b"x" * 30, max_tokens=100))
    driver.run()
    assert len(heard.tokens) == 10
    assert heard.finished[0].reason is FinishReason.LENGTH


def test_max_tokens_zero_ends_without_a_step():
    driver = Driver()
    heard = driver.add(submit(1, max_tokens=0))
    assert heard.finished[0].reason is FinishReason.LENGTH
    assert heard.finished[0].num_generated == 0
    assert not driver.turn()


def test_a_resumed_choice_goes_on_with_its_next_index_and_the_same_tokens():
    message = submit(1, b"x" * 20, max_tokens=30, temperature=1.0, seed=5)
    whole = alone(message)
    for known in (1, 12, 29):
        driver = Driver()
        resumed = submit(1, b"x" * 20, max_tokens=30, temperature=1.0, seed=5, resume=True, generated_ids=whole[:known])
        heard = driver.add(resumed)
        driver.run()
        assert u32(heard.tokens) == whole
        assert heard.finished[0].num_generated == 30


def test_a_resumed_choice_that_was_complete_ends_at_once():
    driver = Driver()
    known = alone(submit(1, b"x", max_tokens=5))
    by_length = driver.add(submit(1, b"x", max_tokens=5, resume=True, generated_ids=known))
    by_stop = driver.add(submit(2, b"x", max_tokens=9, resume=True, generated_ids=known, stop_token_ids=(known[-1],)))
    assert by_length.finished[0].reason is FinishReason.LENGTH
    assert (by_stop.finished[0].reason, by_stop.finished[0].stop_id) == (FinishReason.STOP, known[-1])
    assert not driver.turn()


def test_deadlines_end_waiting_and_running_requests():
    driver = Driver(max_num_seqs=1)
    running = driver.add(submit(1, max_tokens=100, deadline_ms=1000))
    waiting = driver.add(submit(2, max_tokens=100, deadline_ms=500))
    driver.turn()
    driver.now = 0.5
    driver.turn()
    assert waiting.finished[0].error.code is ErrorCode.DEADLINE
    assert waiting.finished[0].error.text == "deadline_ms 500 passed after 0 tokens."
    assert not running.finished
    driver.now = 1.0
    driver.run()
    assert running.finished[0].reason is FinishReason.ERROR
    assert running.finished[0].num_generated == len(running.tokens) == 2


def test_a_lost_gateways_requests_end_and_the_others_go_on():
    driver = Driver(max_num_seqs=2)
    lost = [driver.add(submit(handle, max_tokens=20), owner=1) for handle in range(3)]
    message = submit(0, b"kept", max_tokens=20)
    kept = driver.add(message, owner=2)
    driver.turn()
    driver.scheduler.abort_owner(1)
    driver.hear(driver.scheduler.take_events())
    driver.run()
    assert [h.finished[0].reason for h in lost] == [FinishReason.ABORT] * 3
    assert u32(kept.tokens) == alone(message)
    assert driver.scheduler.num_free_blocks == 64


def test_logits_that_are_not_finite_end_only_their_request():
    driver = Driver()
    bad, good = driver.add(submit(1, b"bad", max_tokens=3)), driver.add(submit(2, b"good", max_tokens=3))
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    driver.runner.launch(plan)
    result = driver.runner.collect()
    failed = StepResult(result.step, result.ids, None, failed=((0, "logits are not finite at position 3"),))
    driver.hear(driver.scheduler.commit(plan, failed))
    assert bad.tokens == []
    assert bad.finished[0].error.code is ErrorCode.INTERNAL
    assert "not finite" in bad.finished[0].error.text
    driver.run()
    assert len(good.tokens) == 3


def test_logprobs_zero_asks_the_device_for_the_one_alternative_that_the_wire_carries():
    driver = Driver()
    for handle, logprobs in enumerate((None, 0, 5)):
        driver.add(submit(handle, max_tokens=1, logprobs=logprobs))
    driver.turn()
    assert [state.sampling.logprobs for state in driver.plans[0].entered] == [None, 1, 5]


def test_min_tokens_masks_the_stop_ids_of_the_request():
    driver = Driver()
    driver.add(submit(0, max_tokens=9, stop_token_ids=(7,)))
    driver.add(submit(1, max_tokens=9, stop_token_ids=(7,), min_tokens=3))
    driver.add(submit(2, max_tokens=9, stop_token_ids=(7,), min_tokens=3, ignore_eos=True))
    driver.turn()
    assert [state.masked_until_min for state in driver.plans[0].entered] == [(), (7, 256, 258), (7,)]


def test_a_newcomer_leaves_a_spare_block_to_each_that_runs():
    driver = Driver(fake_num_blocks=6, enable_prefix_caching=False)
    driver.add(submit(1, b"x" * 30, max_tokens=3))
    driver.turn()
    waiting = driver.add(submit(2, b"y" * 60, max_tokens=1))
    driver.turn()
    assert not waiting.entered  # four blocks are free, it needs four
    driver.run()
    assert len(waiting.tokens) == 1
