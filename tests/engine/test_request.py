"""Request: the token rules by which it ends."""

from __future__ import annotations

import math

import pytest

from engine.request import Request
from protocol import hashing
from protocol.messages import FinishReason, u32
from tests.engine.control import submit

EOS, OTHER_EOS, STOP = 2, 9, 5
END, STOPPED, LENGTH = (FinishReason.STOP, EOS), (FinishReason.STOP, STOP), (FinishReason.LENGTH, None)


def request(generated: list[int], *, context_length: int = 100, prompt: bytes = b"ab", **values: object) -> Request:
    values = {"max_tokens": 50} | values
    message = submit(1, prompt, generated_ids=u32(generated), **values)
    return Request(7, message, eos_ids=(EOS, OTHER_EOS), context_length=context_length, sequence=3, now=10.0)


@pytest.mark.parametrize(
    ("generated", "values", "verdict"),
    [
        ([7], {}, None),
        ([7, EOS], {}, END),
        ([7, OTHER_EOS], {}, (FinishReason.STOP, OTHER_EOS)),
        ([7, EOS], {"ignore_eos": True}, None),
        ([7, OTHER_EOS], {"ignore_eos": True}, None),
        ([7, STOP], {"stop_token_ids": (STOP,)}, STOPPED),
        ([7, STOP], {"stop_token_ids": (STOP,), "ignore_eos": True}, STOPPED),
        ([7, EOS], {"stop_token_ids": (STOP,)}, END),
        ([EOS, 7], {}, None),
        # A stop id counts from the token after the first min_tokens on.
        ([7, EOS], {"min_tokens": 2}, None),
        ([7, 7, EOS], {"min_tokens": 2}, END),
        ([7, 7], {"max_tokens": 2}, LENGTH),
        ([7, 7], {"max_tokens": 3}, None),
        ([7, EOS], {"max_tokens": 2}, END),
        ([], {"max_tokens": 0}, LENGTH),
        ([7, 7], {"context_length": 4}, LENGTH),
        ([7, 7], {"context_length": 5}, None),
        # A prompt may end in a stop id.
        ([], {"prompt": bytes([1, EOS])}, None),
    ],
)
def test_verdict(generated, values, verdict):
    assert request(generated, **values).verdict() == verdict


def test_generated_ids_count_from_the_beginning_of_its_life():
    resumed = request([7, 7, 7], max_tokens=4)
    assert resumed.num_prompt == 2
    assert resumed.num_generated == 3
    assert resumed.limit == 6


def test_nothing_is_left_to_compute_when_the_last_token_is_being_sampled():
    started = request([7], max_tokens=3)
    assert started.num_uncomputed == 3
    started.num_planned, started.num_pending = 3, 1
    assert started.num_uncomputed == 1
    started.num_planned, started.num_pending = 4, 2
    assert started.num_uncomputed == 0


def test_order_is_priority_then_begun_work_then_arrival():
    plain, urgent = request([7]), request([7], priority=-1)
    resumed = request([7], resume=True)
    assert sorted([plain, resumed, urgent], key=lambda r: r.order) == [urgent, resumed, plain]
    plain.restart()
    assert plain.order == resumed.order


def test_deadline():
    assert request([7]).deadline == math.inf
    assert request([7], deadline_ms=1500).deadline == 11.5


def test_hashes_name_the_full_blocks_of_the_known_tokens():
    grown = request([], prompt=b"x" * 40, salt="s", adapter="a")
    grown.extend_hashes(16)
    assert grown.hashes[1:] == list(hashing.chain(grown.ids, 16, hashing.root("s", "a")))
    assert len(grown.hashes) == 3
    grown.ids.extend([1] * 8)
    grown.extend_hashes(16)
    assert grown.hashes[1:] == list(hashing.chain(grown.ids, 16, hashing.root("s", "a")))
    assert len(grown.hashes) == 4


def test_a_request_ends_once():
    ended = request([7, EOS])
    finished = ended.finish(FinishReason.STOP, stop_id=EOS)
    assert (finished.num_prompt, finished.num_cached, finished.num_generated, finished.stop_id) == (2, 0, 2, EOS)
    with pytest.raises(AssertionError, match="ends once"):
        ended.finish(FinishReason.ABORT)
