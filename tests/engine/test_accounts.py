"""Account and share: credit, to the request and the token."""

from __future__ import annotations

import pytest

from engine.accounts import GRANT_GRACE_S, Account, Grant, share
from engine.mailbox import Mailbox, Sent
from protocol.messages import ErrorCode
from tests.engine.control import Driver, submit

RESOLVED = Driver(max_num_seqs=16, max_num_batched_tokens=32, max_model_len=512).resolved


@pytest.mark.parametrize(
    ("num_gateways", "grant"),
    [
        (1, Grant(32, 2048)),  # 4 contexts and 64 steps are the same here
        (2, Grant(16, 1024)),
        (3, Grant(10, 682)),
        (8, Grant(4, 512)),
        (100, Grant(4, 512)),
    ],
)
def test_grants_are_shared_down_to_four_requests_and_one_context(num_gateways, grant):
    assert share(RESOLVED, num_gateways) == grant


def test_prompt_tokens_of_a_short_context_are_granted_by_steps():
    short = Driver(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512).resolved
    assert share(short, 1).tokens == 64 * 256


def account(requests: int = 2, tokens: int = 100) -> Account:
    made = Account(1, b"id", "name", Mailbox(lambda frame: Sent.SENT), now=0.0)
    made.set_grant(Grant(requests, tokens), now=0.0)
    return made


def test_requests_beyond_the_grant_are_refused_until_one_finishes():
    of = account(requests=2)
    of.submitted(submit(1))
    of.submitted(submit(2))
    failure = of.beyond_grant(submit(3), now=5.0)
    assert failure is not None
    assert failure.code is ErrorCode.OVERLOADED
    assert failure.text == "2 requests of this gateway are here; 2 are granted."
    of.admitted(1)
    assert of.beyond_grant(submit(3), now=5.0) is not None
    of.finished(1)
    assert of.beyond_grant(submit(3), now=5.0) is None
    assert not of.has(1)
    assert of.has(2)


def test_prompt_ids_count_until_the_request_has_a_slot():
    of = account(requests=9, tokens=100)
    of.submitted(submit(1, b"x" * 60))
    failure = of.beyond_grant(submit(2, b"x" * 41), now=5.0)
    assert failure is not None
    assert failure.text == "101 prompt ids would wait; 100 are granted."
    assert of.beyond_grant(submit(2, b"x" * 40), now=5.0) is None
    of.admitted(1)
    assert of.beyond_grant(submit(2, b"x" * 100), now=5.0) is None


def test_prompt_ids_of_a_request_that_ends_while_waiting_count_no_longer():
    of = account(requests=9, tokens=100)
    of.submitted(submit(1, b"x" * 60))
    of.finished(1)
    assert of.beyond_grant(submit(2, b"x" * 100), now=5.0) is None


def test_resuming_needs_no_credit_and_takes_none():
    of = account(requests=1, tokens=10)
    of.submitted(submit(1, b"x" * 50, resume=True))
    assert of.num_resuming == 1
    assert of.beyond_grant(submit(2, b"x" * 10), now=5.0) is None
    of.submitted(submit(2, b"x" * 10))
    assert of.beyond_grant(submit(3, b"x" * 50, resume=True), now=5.0) is None
    assert of.num_resuming == 1
    of.admitted(1)
    assert of.num_resuming == 0
    of.finished(1)
    of.finished(2)
    assert of.num_live == 0


def test_a_lowered_grant_still_holds_for_submits_on_their_way():
    of = account(requests=2)
    of.submitted(submit(1))
    of.set_grant(Grant(1, 100), now=10.0)
    assert of.beyond_grant(submit(2), now=10.0 + GRANT_GRACE_S / 2) is None
    assert of.beyond_grant(submit(2), now=10.0 + GRANT_GRACE_S) is not None
