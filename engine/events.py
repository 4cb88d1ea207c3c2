"""What the scheduler tells: values on their way from a committed step to the gateways.

`to_messages` sorts the events of one step by gateway and lays down their messages; every gateway
gets at most one Step for it. Logprobs of prompts have messages of their own, in slices.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.plan import Scoring, StepResult
from engine.request import Request
from protocol.codec import most_prompt_rows
from protocol.messages import U16, U32, Admitted, Finished, Logprobs, PromptLogprobs, Step


@dataclass(frozen=True, slots=True)
class Entered:
    """A request got its first slot, at a monotonic time in seconds."""

    owner: int
    message: Admitted
    at: float


@dataclass(slots=True)
class Sampled:
    """A request got its generated token number `index`; `row` is its row of the step's logprobs.

    Not frozen, as `PlanEntry`.
    """

    request: Request
    index: int
    token: int
    row: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Prompt logprobs of a request; `row` is the first of their rows of the step's `scored`."""

    request: Request
    scoring: Scoring
    row: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over; nothing more comes for its handle."""

    owner: int
    message: Finished


Event = Entered | Sampled | Scored | Ended

#: A message and the account number of the gateway it is for.
Delivery = tuple[int, Admitted | PromptLogprobs | Step | Finished]


@dataclass(slots=True)
class _Mail:
    admitted: list[Admitted] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


def to_messages(step: int, events: list[Event], result: StepResult | None) -> list[Delivery]:
    """Messages in the order to send: for each owner what began, logprobs of prompts, one Step, what ended.

    `result` is that of the step, None for events between steps.
    """
    mails: defaultdict[int, _Mail] = defaultdict(_Mail)
    for event in events:
        match event:
            case Sampled(request=request):
                mails[request.owner].sampled.append(event)
            case Scored(request=request):
                mails[request.owner].scored.append(event)
            case Entered(owner=owner, message=message):
                mails[owner].admitted.append(message)
            case Ended(owner=owner, message=finished):
                mails[owner].finished.append(finished)
    messages: list[Delivery] = []
    for owner, mail in mails.items():
        messages += [(owner, admitted) for admitted in mail.admitted]
        if mail.scored:
            assert result is not None
            assert result.scored is not None
            messages += [(owner, part) for scored in mail.scored for part in _slices(scored, result.scored)]
        if mail.sampled:
            assert result is not None
            messages.append((owner, _step(step, mail.sampled, result.logprobs)))
        messages += [(owner, finished) for finished in mail.finished]
    return messages


def _step(step: int, sampled: list[Sampled], logprobs: Logprobs | None) -> Step:
    asked = [k for s in sampled if (k := s.request.submit.sampling.logprobs) is not None]
    return Step(
        step=step,
        handles=array(U32, [s.request.handle for s in sampled]),
        firsts=array(U32, [s.index for s in sampled]),
        counts=array(U16, [1]) * len(sampled),
        ids=array(U32, [s.token for s in sampled]),
        logprobs=_rows(logprobs, [s.row for s in sampled], max(asked)) if asked and logprobs else None,
    )


def _slices(scored: Scored, logprobs: Logprobs) -> Iterator[PromptLogprobs]:
    scoring = scored.scoring
    count, most = len(scoring.ids), most_prompt_rows(scoring.k)
    for at in range(0, count, most):
        rows = range(scored.row + at, scored.row + min(at + most, count))
        yield PromptLogprobs(scored.request.handle, scoring.first + at, _rows(logprobs, rows, scoring.k))


def _rows(logprobs: Logprobs, rows: Sequence[int], k: int) -> Logprobs:
    """The rows of one gateway, no wider than it asked; the wire carries at least one alternative."""
    width, k = logprobs.k, max(k, 1)
    assert k <= width, f"{k} alternatives asked, the step has {width}"
    part = Logprobs(k, array("f"), array(U32), array(U32), array("f"))
    for row in rows:
        part.own.append(logprobs.own[row])
        part.rank.append(logprobs.rank[row])
        part.top_ids.extend(logprobs.top_ids[row * width : row * width + k])
        part.top.extend(logprobs.top[row * width : row * width + k])
    return part
