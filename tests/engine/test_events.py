"""to_messages: one Step for each gateway, with the logprobs that it asked for."""

from __future__ import annotations

from engine.events import Ended, Entered, Event, Sampled, Scored, to_messages
from engine.plan import Scoring, StepResult
from engine.request import Request
from protocol.codec import encode
from protocol.messages import Admitted, Finished, FinishReason, Logprobs, PromptLogprobs, Step, f32, u32
from tests.engine.control import submit, u16


def request(owner: int, handle: int, logprobs: int | None = None) -> Request:
    message = submit(handle, max_tokens=9, logprobs=logprobs)
    return Request(owner, message, eos_ids=(), context_length=99, sequence=handle, now=0.0)


def test_what_a_gateway_hears_is_in_order_and_its_tokens_are_one_step():
    finished = Finished(1, FinishReason.LENGTH, 6, 0, 3)
    events: list[Event] = [
        Entered(7, Admitted(2, 16, 5), 1.5),
        Sampled(request(7, 1), 2, 65, 0),
        Ended(7, finished),
        Sampled(request(8, 1), 0, 66, 1),
        Sampled(request(7, 2), 0, 67, 2),
    ]
    assert to_messages(40, events, StepResult(40, u32([65, 66, 67]))) == [
        (7, Admitted(2, 16, 5)),
        (7, Step(40, u32([1, 2]), u32([2, 0]), u16([1, 1]), u32([65, 67]))),
        (7, finished),
        (8, Step(40, u32([1]), u32([0]), u16([1]), u32([66]))),
    ]


def test_logprobs_go_to_the_gateways_that_asked_and_no_wider():
    logprobs = Logprobs(
        k=3,
        own=f32([-1, -2, -3]),
        rank=u32([1, 2, 3]),
        top_ids=u32([10, 11, 12, 20, 21, 22, 30, 31, 32]),
        top=f32([-1, -1.5, -2, -1, -2, -3, -1, -4, -5]),
    )
    events: list[Event] = [
        Sampled(request(7, 1, logprobs=2), 0, 10, 0),
        Sampled(request(8, 1), 0, 21, 1),
        Sampled(request(7, 2), 0, 32, 2),
        Sampled(request(9, 1, logprobs=0), 0, 32, 2),
    ]
    steps = dict(to_messages(1, events, StepResult(1, u32([10, 21, 32]), logprobs)))
    assert steps[7].logprobs == Logprobs(2, f32([-1, -3]), u32([1, 3]), u32([10, 11, 30, 31]), f32([-1, -1.5, -1, -4]))
    assert steps[8].logprobs is None
    # The wire carries at least one alternative, also for logprobs 0.
    assert steps[9].logprobs == Logprobs(1, f32([-3]), u32([3]), u32([30]), f32([-1]))


def test_logprobs_of_prompts_are_messages_of_their_own_before_the_step():
    scored = Logprobs(
        2, f32([-1, -2, -3]), u32([1, 2, 3]), u32([10, 11, 20, 21, 30, 31]), f32([-1, -2, -3, -4, -5, -6])
    )
    events: list[Event] = [
        Scored(request(7, 1), Scoring(4, u32([10, 20]), 1), 0),
        Sampled(request(7, 1), 0, 65, 0),
        Scored(request(7, 2), Scoring(1, u32([30]), 2), 2),
    ]
    messages = [message for _, message in to_messages(3, events, StepResult(3, u32([65]), scored=scored))]
    assert messages == [
        PromptLogprobs(1, 4, Logprobs(1, f32([-1, -2]), u32([1, 2]), u32([10, 20]), f32([-1, -3]))),
        PromptLogprobs(2, 1, Logprobs(2, f32([-3]), u32([3]), u32([30, 31]), f32([-5, -6]))),
        Step(3, u32([1]), u32([0]), u16([1]), u32([65])),
    ]


def test_a_long_prompt_comes_in_slices_that_fit_their_frames():
    k, count = 20, 15_000
    scored = Logprobs(k, f32([-1]) * count, u32([1]) * count, u32([5]) * count * k, f32([-1]) * count * k)
    events: list[Event] = [Scored(request(7, 1), Scoring(2, u32([5]) * count, k), 0)]
    messages = [message for _, message in to_messages(1, events, StepResult(1, u32(), scored=scored))]
    assert all(len(encode(message)) <= 2**20 for message in messages)
    assert len(messages) == 3
    ends = [message.first + len(message.logprobs.own) for message in messages]
    assert [message.first for message in messages] == [2, *ends[:-1]]
    assert ends[-1] == 2 + count


def test_nothing_happened():
    assert to_messages(1, [], None) == []
