"""Reception: greetings, refusals, credit, silence, with sockets and time held by the test."""

from __future__ import annotations

import logging
from collections import deque

import pytest

from engine.inbox import Aborted, OwnerLost, Submitted
from engine.reception import MAX_MAIL_BYTES
from engine.status import Status
from protocol.codec import encode
from protocol.messages import (
    Abort,
    AbortReason,
    Admitted,
    BundlePart,
    BundleRequest,
    EngineBeat,
    ErrorCode,
    Finished,
    FinishReason,
    FromEngine,
    GatewayBeat,
    Hello,
    Phase,
    Reject,
    RejectCode,
    Role,
    Step,
    Submit,
    Totals,
    Welcome,
    u32,
)
from tests.engine.control import Driver, submit, u16
from tests.engine.desk import Desk

RESOLVED = Driver(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128).resolved
HELLO = Hello((1, 0), Role.GATEWAY, "gate", "0.1.0")


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


@pytest.fixture
def serving(desk: Desk) -> Desk:
    """A desk that serves, with the peer b"a" greeted."""
    desk.reception.serve(RESOLVED)
    desk.says(b"a", HELLO)
    return desk


def error_of(messages: list[FromEngine]) -> tuple[ErrorCode, str]:
    (finished,) = messages
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.ERROR
    assert finished.error is not None
    return finished.error.code, finished.error.text


# --- greetings -----------------------------------------------------------------------------------


def test_hello_is_welcomed_while_loading_and_again_when_serving_begins(desk):
    assert desk.says(b"a", HELLO) == [Welcome((1, 0), "engine-1", 77, Phase.LOADING)]
    desk.reception.serve(RESOLVED)
    (welcome,) = desk.heard(b"a")
    assert isinstance(welcome, Welcome)
    assert welcome.phase is Phase.SERVING
    serving = welcome.serving
    assert serving is not None
    assert (serving.model, serving.digest, serving.numerics) == ("fake", RESOLVED.info.digest, RESOLVED.info.numerics)
    assert (serving.vocab_size, serving.context_length, serving.block_size, serving.num_blocks) == (260, 128, 16, 64)
    assert (serving.max_num_seqs, serving.eos_ids, serving.hang_timeout_ms) == (4, (258, 256), 10_000)
    assert (serving.grant_requests, serving.grant_tokens) == (8, 1024)


def test_the_first_frame_must_be_a_hello(desk):
    for message in (GatewayBeat(1), submit(1), Abort(1, AbortReason.CLIENT), BundleRequest("0" * 64)):
        (reject,) = desk.says(b"a", message)
        assert isinstance(reject, Reject)
        assert reject.code is RejectCode.HELLO_REQUIRED
    assert desk.reception.num_accounts == 0
    assert desk.inbox.take() == []


@pytest.mark.parametrize(
    "frame", [b"", b"\x01", b"\x01\xff\xff\xff\xff{}", b"\x63\x02\x00\x00\x00{}", b"\x08\x02\0\0\0{}"]
)
def test_nonsense_from_a_stranger_is_rejected(desk, frame):
    desk.reception.receive(b"a", frame)
    (reject,) = desk.heard(b"a")
    assert reject.code is RejectCode.HELLO_REQUIRED


def test_another_major_is_rejected_and_the_lower_minor_is_spoken(desk):
    (reject,) = desk.says(b"a", Hello((2, 0), Role.GATEWAY, "gate", "9"))
    assert reject == Reject(RejectCode.PROTOCOL, "This engine speaks protocol 1.x, the gateway 2.x.")
    (welcome,) = desk.says(b"b", Hello((1, 7), Role.GATEWAY, "gate", "9"))
    assert welcome.protocol == (1, 0)


def test_operators_have_no_place_yet(desk):
    (reject,) = desk.says(b"a", Hello((1, 0), Role.OPERATOR, "gate", "9"))
    assert reject.code is RejectCode.ROLE


def test_a_second_hello_costs_the_account(serving):
    (reject,) = serving.says(b"a", HELLO)
    assert reject.code is RejectCode.PROTOCOL
    assert serving.reception.num_accounts == 0
    assert serving.says(b"a", HELLO, submit(1)) == [Reject(RejectCode.ACCOUNT_LOST, reject.text)] * 2
    assert serving.inbox.take() == [OwnerLost(1)]


def test_late_frames_of_a_dropped_connection_are_not_read(serving, monkeypatch):
    """There may be thousands, and until the last was taken libzmq keeps the connection."""
    serving.says(b"a", HELLO, HELLO)
    serving.heard(b"a")
    monkeypatch.setattr("engine.reception.decode_from_gateway", lambda frame: pytest.fail("read"))
    serving.reception.receive(b"a", b"nonsense")
    (reject,) = serving.heard(b"a")
    assert reject.code is RejectCode.ACCOUNT_LOST


# --- submits -------------------------------------------------------------------------------------


def test_a_submit_reaches_the_step_loop_under_the_accounts_number(serving):
    serving.says(b"b", HELLO)
    message = submit(4, temperature=0.5)
    assert serving.says(b"b", message) == []
    (arrival,) = serving.inbox.take()
    assert arrival == Submitted(2, message)


def test_refusals_are_finished_with_an_error(serving, desk):
    finished = serving.says(b"a", submit(4, b"x" * 200))
    assert error_of(finished) == (
        ErrorCode.TOO_LONG,
        "prompt_ids has 200 tokens; with one to generate the context of 128 is too short.",
    )
    assert finished[0].num_prompt == 200
    assert serving.inbox.take() == []
    # The handle is free again.
    assert serving.says(b"a", submit(4)) == []


def test_submits_while_loading_and_draining_are_refused(desk):
    desk.says(b"a", HELLO)
    assert error_of(desk.says(b"a", submit(1)))[0] is ErrorCode.OVERLOADED
    desk.reception.serve(RESOLVED)
    desk.reception.drain(Status())
    desk.heard(b"a")
    assert error_of(desk.says(b"a", submit(1, resume=True)))[0] is ErrorCode.DRAINING


def test_credit_is_enforced_to_the_request(serving):
    assert serving.says(b"a", *(submit(handle) for handle in range(8))) == []
    code, text = error_of(serving.says(b"a", submit(8)))
    assert (code, text) == (ErrorCode.OVERLOADED, "8 requests of this gateway are here; 8 are granted.")
    serving.reception.deliver([(1, Finished(0, FinishReason.LENGTH, 6, 0, 16))])
    serving.heard(b"a")
    assert serving.says(b"a", submit(8)) == []


def test_credit_is_enforced_to_the_token_until_admitted(desk):
    desk.reception.serve(Driver(max_num_seqs=16, max_num_batched_tokens=16, max_model_len=128).resolved)
    desk.says(b"a", HELLO)
    assert desk.says(b"a", *(submit(handle, b"x" * 128, max_tokens=0) for handle in range(8))) == []
    code, text = error_of(desk.says(b"a", submit(8)))
    assert (code, text) == (ErrorCode.OVERLOADED, "1030 prompt ids would wait; 1024 are granted.")
    desk.reception.deliver([(1, Admitted(1, 0, 3))])
    desk.heard(b"a")
    assert desk.says(b"a", submit(8, b"x" * 120)) == []


def test_resumed_submits_need_no_credit_but_are_bounded(serving):
    serving.says(b"a", *(submit(handle) for handle in range(8)))
    resumed = [submit(100 + number, resume=True) for number in range(8)]
    assert serving.says(b"a", *resumed) == []
    assert error_of(serving.says(b"a", submit(200, resume=True))) == (
        ErrorCode.OVERLOADED,
        "8 resumed requests wait; 8 may.",
    )
    serving.reception.deliver([(1, Admitted(100, 0, 0))])
    serving.heard(b"a")
    assert serving.says(b"a", submit(200, resume=True)) == []


def test_grants_shrink_and_grow_with_the_number_of_gateways(serving):
    serving.says(b"b", HELLO)
    serving.reception.tick(Status())
    grants = [(beat.grant_requests, beat.grant_tokens) for beat in (serving.heard(b"a")[-1], serving.heard(b"b")[-1])]
    assert grants == [(4, 512), (4, 512)]
    serving.gone.add(b"b")
    serving.reception.tick(Status())
    serving.reception.tick(Status())
    assert serving.heard(b"a")[-1].grant_requests == 8


def test_a_handle_in_use_costs_the_account(serving):
    serving.says(b"a", submit(1))
    (reject,) = serving.says(b"a", submit(1))
    assert reject == Reject(RejectCode.PROTOCOL, "Submit: handle 1 is in use until its Finished.")
    assert serving.inbox.take()[-1] == OwnerLost(1)


def test_a_malformed_submit_is_refused_by_its_handle(serving):
    frame = encode(submit(6, temperature=0.25)).replace(b'"temperature":0.25', b'"temperature":9.25')
    serving.reception.receive(b"a", frame)
    code, text = error_of(serving.heard(b"a"))
    assert code is ErrorCode.BAD_REQUEST
    assert "temperature" in text
    assert "9.25" in text
    assert serving.reception.num_accounts == 1


@pytest.mark.parametrize("frame", [b"", b"\x04\xff\xff\xff\xff", b"\x04\x02\x00\x00\x00{}", b"\x05\x02\x00\x00\x00{}"])
def test_other_nonsense_costs_the_account_and_nobody_elses(serving, frame, caplog):
    serving.says(b"b", HELLO)
    with caplog.at_level(logging.WARNING):
        serving.reception.receive(b"a", frame)
        serving.reception.receive(b"a", frame)
    rejects = serving.heard(b"a")
    assert [reject.code for reject in rejects] == [RejectCode.PROTOCOL, RejectCode.ACCOUNT_LOST]
    assert serving.inbox.take() == [OwnerLost(1)]
    assert len(caplog.records) == 1
    assert serving.says(b"b", submit(1)) == []


def test_a_kind_of_a_later_minor_is_ignored(serving):
    serving.reception.receive(b"a", b"\x63\x02\x00\x00\x00{}")
    assert serving.heard(b"a") == []
    assert serving.reception.num_accounts == 1


# --- deliveries ----------------------------------------------------------------------------------


def test_abort_of_a_live_handle_reaches_the_step_loop_and_another_does_not(serving):
    serving.says(b"a", submit(1))
    serving.inbox.take()
    serving.says(b"a", Abort(1, AbortReason.CLIENT), Abort(2, AbortReason.CLIENT))
    assert serving.inbox.take() == [Aborted(1, 1)]


def test_a_handle_may_be_used_again_after_its_finished(serving):
    serving.says(b"a", submit(1))
    finished = Finished(1, FinishReason.LENGTH, 6, 0, 16)
    serving.reception.deliver([(1, finished)])
    assert serving.heard(b"a") == [finished]
    assert serving.says(b"a", submit(1)) == []
    assert len(serving.inbox.take()) == 2


def test_messages_for_a_gateway_that_is_gone_are_dropped(serving):
    serving.says(b"a", submit(1))
    serving.gone.add(b"a")
    step = Step(1, u32([1]), u32([0]), u16([1]), u32([65]))
    serving.reception.deliver([(1, step)])
    assert serving.inbox.take()[-1] == OwnerLost(1)
    serving.reception.deliver([(1, step), (1, Finished(1, FinishReason.ABORT, 6, 0, 1))])
    assert serving.reception.num_accounts == 0


def test_late_frames_of_a_connection_that_is_gone_are_only_read(serving):
    serving.gone.add(b"a")
    serving.says(b"a", HELLO)  # a second one: the account is dropped, and nobody hears why
    rejected, refused = serving.reception.num_rejected, serving.num_refused
    serving.says(b"a", *[GatewayBeat(i) for i in range(10)])
    assert serving.reception.num_rejected == rejected + 10
    assert serving.num_refused == refused + 1


@pytest.mark.parametrize(("messages", "level"), [([], logging.INFO), ([submit(1)], logging.WARNING)])
def test_a_gateway_that_leaves_is_warned_of_where_work_is_lost(serving, messages, level, caplog):
    serving.says(b"a", *messages)
    serving.gone.add(b"a")
    with caplog.at_level(logging.INFO):
        serving.reception.tick(Status())
    assert [(record.message, record.levelno) for record in caplog.records] == [("gateway_dropped", level)]


def test_the_bundle_is_sent_by_its_hash_and_no_other_is(serving):
    (welcome,) = serving.says(b"b", HELLO)
    parts = serving.says(b"b", BundleRequest(welcome.serving.bundle))
    assert all(isinstance(part, BundlePart) for part in parts)
    assert b"".join(part.data for part in parts) == RESOLVED.info.bundle
    (reject,) = serving.says(b"b", BundleRequest("0" * 64))
    assert reject.code is RejectCode.PROTOCOL


# --- time ----------------------------------------------------------------------------------------


def test_beats_tell_progress(serving):
    totals = Totals(generated=5)
    status = Status(9, serving.now - 1.5, 2.25, running=3, waiting=4, free_blocks=50, totals=totals)
    serving.reception.tick(status)
    assert serving.heard(b"a") == [
        EngineBeat(1, Phase.SERVING, 9, 1500, 2250, 3, 4, 50, grant_requests=8, grant_tokens=1024, totals=totals)
    ]
    serving.reception.tick(Status())
    (beat,) = serving.heard(b"a")
    assert (beat.seq, beat.step_age_ms) == (2, 0)


def test_silence_of_ten_seconds_costs_the_account_and_a_late_frame_hears_so(serving):
    serving.says(b"a", submit(1))
    serving.says(b"b", HELLO)
    serving.inbox.take()
    for _ in range(40):
        serving.now += 0.25
        serving.says(b"b", GatewayBeat(1))
        serving.reception.tick(Status())
    assert serving.inbox.take() == []
    serving.now += 0.25
    serving.reception.tick(Status())
    assert serving.inbox.take() == [OwnerLost(1)]
    serving.heard(b"a")
    assert serving.says(b"a", GatewayBeat(2)) == [
        Reject(RejectCode.ACCOUNT_LOST, "Nothing came from the gateway for 10000 ms.")
    ]
    assert serving.reception.num_accounts == 1


def test_silence_proves_nothing_when_the_engine_itself_stood_still(serving):
    serving.now += 60.0
    serving.reception.tick(Status())
    assert serving.reception.num_accounts == 1


def test_a_gateway_that_reads_nothing_for_five_seconds_loses_its_account(serving):
    serving.says(b"a", submit(1))
    serving.full.add(b"a")
    serving.reception.deliver([(1, Step(1, u32([1]), u32([0]), u16([1]), u32([65])))])
    assert serving.reception.is_stuck
    serving.now += 4.9
    serving.reception.retry()
    assert serving.reception.num_accounts == 1
    serving.now += 0.2
    serving.reception.retry()
    assert serving.reception.num_accounts == 0
    assert serving.inbox.take()[-1] == OwnerLost(1)
    assert not serving.reception.is_stuck


def test_mail_is_bounded(serving):
    serving.says(b"a", submit(1))
    serving.full.add(b"a")
    step = Step(1, u32([1] * 4096), u32([0] * 4096), u16([1] * 4096), u32([65] * 4096))
    deliveries: deque[Step] = deque([step] * (MAX_MAIL_BYTES // (14 * 4096) + 1))
    while serving.reception.num_accounts and deliveries:
        serving.reception.deliver([(1, deliveries.pop())])
    assert serving.reception.num_accounts == 0
    assert len(deliveries) <= 2


def test_a_gateway_that_reads_again_in_time_gets_everything(serving):
    serving.says(b"a", Submit(1, "r", u32([1]), submit(1).sampling, 0))
    serving.full.add(b"a")
    for index in range(50):
        serving.reception.deliver([(1, Step(index, u32([1]), u32([index]), u16([1]), u32([65])))])
        serving.reception.tick(Status())
    serving.full.clear()
    serving.reception.retry()
    steps = [message for message in serving.heard(b"a") if isinstance(message, Step)]
    assert [list(step.firsts) for step in steps] == [[0], list(range(1, 50))]
