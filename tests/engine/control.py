"""Drives the engine's control plane over the fake backend, step by step and without threads."""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from dataclasses import dataclass, field

from engine.backends.fake import FakeRunner, mix
from engine.config import EngineConfig, Resolved, resolve
from engine.events import Ended, Entered, Event, Sampled, Scored
from engine.plan import StepPlan, StepResult
from engine.request import RequestKey
from engine.scheduler import Scheduler
from protocol.messages import U16, Finished, Logprobs, Submit, u32
from protocol.sampling import SamplingParams, splitmix64

OWNER = 1


def fake_config(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"backend": "fake", "fake_num_blocks": 64, "max_model_len": 512} | values)


def submit(handle: int, prompt: bytes | list[int] = b"prompt", **values: object) -> Submit:
    """A Submit; `values` go to the sampling parameters or the message, wherever the name belongs."""
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    sampling = {name: value for name, value in values.items() if name in names}
    message = {name: value for name, value in values.items() if name not in names}
    message.setdefault("seed", 0)
    return Submit(
        handle=handle,
        request_id=f"request-{handle}",
        prompt_ids=u32(list(prompt)),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        **message,  # type: ignore[arg-type]
    )


@dataclass
class Heard:
    """All that was told about one Submit."""

    entered: list[Entered] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position
    finished: list[Finished] = field(default_factory=list)


class Driver:
    """A scheduler and a fake runner, with the loop of `engine.core` laid open."""

    def __init__(self, **values: object) -> None:
        config = fake_config(**values)
        self.runner = FakeRunner(config)
        self.resolved: Resolved = resolve(config, self.runner.load(lambda phase, done, total: None))
        self.scheduler = Scheduler(self.resolved)
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.heard: dict[RequestKey, Heard] = {}
        self._in_flight: deque[StepPlan] = deque()

    def add(self, message: Submit, owner: int = OWNER) -> Heard:
        """Submit; what will be heard of it. The key may be used again after its end."""
        heard = self.heard[owner, message.handle] = Heard(tokens=list(message.generated_ids))
        self.scheduler.add(owner, message, self.now)
        self.hear(self.scheduler.take_events())
        return heard

    def turn(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        self.scheduler.expire(self.now)
        self.hear(self.scheduler.take_events())
        plan = None
        if len(self._in_flight) < self.runner.max_in_flight:
            plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.runner.launch(plan)
            self._in_flight.append(plan)
        busy = bool(self._in_flight)
        if busy and (plan is None or len(self._in_flight) == self.runner.max_in_flight):
            result = self.runner.collect()
            self.hear(self.scheduler.commit(self._in_flight.popleft(), result), result)
        self.scheduler.check()
        return busy

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.turn():
            pass
        assert not self.scheduler.has_requests

    def hear(self, events: list[Event], result: StepResult | None = None) -> None:
        for event in events:
            match event:
                case Entered(owner=owner, message=message):
                    self.heard[owner, message.handle].entered.append(event)
                case Sampled(request=request, index=index, token=token):
                    heard = self.heard[request.key]
                    assert not heard.finished, "a token after the end"
                    assert index == len(heard.tokens), "a token is repeated or skipped"
                    heard.tokens.append(token)
                case Scored(request=request, scoring=scoring, row=row):
                    assert result is not None
                    _hear_scored(self.heard[request.key], scoring.first, len(scoring.ids), row, result.scored)
                case Ended(owner=owner, message=message):
                    self.heard[owner, message.handle].finished.append(message)


def _hear_scored(heard: Heard, first: int, count: int, row: int, scored: Logprobs | None) -> None:
    assert scored is not None
    assert not heard.tokens, "a prompt's logprobs after a token"
    assert not heard.finished, "a prompt's logprobs after the end"
    assert not heard.prompt_logprobs or first == max(heard.prompt_logprobs) + 1, "one is repeated or skipped"
    heard.prompt_logprobs.update(zip(range(first, first + count), scored.own[row : row + count], strict=True))


def fake_prompt_logprobs(prompt: bytes, first: int = 1) -> dict[int, float]:
    """What the fake backend gives for the prompt's tokens from position `first` on."""
    expected, state = {}, 0
    for position, token in enumerate(prompt[:-1], 1):
        state = mix(state, token)
        if position >= first:
            expected[position] = -1.0 - (splitmix64(state) % 4096) / 256
    return expected


def alone(message: Submit, *, mean_length: int = 0) -> array[int]:
    """The ids that a choice gets when nothing else runs and nothing is cached."""
    driver = Driver(enable_prefix_caching=False, fake_mean_length=mean_length)
    plain = dataclasses.replace(
        message, generated_ids=u32(), priority=0, group=None, leader=False, resume=False, deadline_ms=0
    )
    heard = driver.add(plain)
    driver.run()
    return u32(heard.tokens)


def u16(values: list[int]) -> array[int]:
    return array(U16, values)
