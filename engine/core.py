"""The step loop: inbox → schedule → launch and collect → commit → outbox.

Knows neither sockets nor tensors. One thread runs it; `status` may be read from any.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from engine.config import Resolved
from engine.events import Delivery, Event, to_messages
from engine.inbox import Aborted, Drain, Inbox, OwnerLost, Submitted
from engine.metrics import EngineMetrics
from engine.plan import Runner, StepPlan
from engine.scheduler import Scheduler
from engine.status import LongestStep, Status
from protocol.messages import ErrorCode

#: With nothing to compute, the threads that carry the last tokens out have the interpreter to themselves for so long.
_QUIET_S = 0.0005


class EngineCore:
    """Drives one runner. `deliver` takes the messages of a step, in order; it must not block."""

    def __init__(
        self,
        resolved: Resolved,
        runner: Runner,
        inbox: Inbox,
        deliver: Callable[[list[Delivery]], None],
        metrics: EngineMetrics,
    ) -> None:
        self.scheduler = Scheduler(resolved)
        self._runner = runner
        self._inbox = inbox
        self._deliver = deliver
        self._metrics = metrics
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with the time of launch
        self._unobserved: tuple[StepPlan, float, float, list[Event]] | None = None  # the last step to be committed
        self._longest = LongestStep()
        self._last_commit = 0.0
        self._busy_since: float | None = None
        self._drain_deadline = math.inf
        self._draining = False

    @property
    def status(self) -> Status:
        """This moment. Looked up when somebody asks, four times a second, since each step would wait for it."""
        scheduler = self.scheduler
        return Status(
            step=scheduler.num_steps,
            busy_since=self._busy_since,
            longest_step_s=self._longest.value(time.monotonic()),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=scheduler.num_free_blocks,
            totals=scheduler.counts.totals(),
        )

    def run(self) -> None:
        """Step until drained. Raises what the runner raises: the device is lost."""
        while True:
            if self.step():
                continue
            if self._draining:
                return
            self._inbox.wait(_QUIET_S)
            self.tidy()
            self._inbox.wait()

    def step(self) -> bool:
        """One turn; False when no request is left and nothing will be to do before something arrives."""
        now = time.monotonic()
        self._drain_inbox(now)
        scheduler = self.scheduler
        scheduler.expire(now)
        if now >= self._drain_deadline:
            scheduler.fail_all(ErrorCode.DRAINING, "The engine shuts down.")
        plan = None
        if scheduler.has_requests and len(self._in_flight) < self._runner.max_in_flight:
            plan = scheduler.schedule(now)
        if plan is not None:
            if not self._in_flight:
                self._busy_since = now
            self._in_flight.append((plan, now))
            self._runner.launch(plan)
            self._observe()  # now that the device has work
        # What a commit frees may let others enter, so a turn that collects is never the last.
        busy = bool(self._in_flight)
        if busy and (plan is None or len(self._in_flight) == self._runner.max_in_flight):
            self._collect()
        elif events := scheduler.take_events():
            self._deliver(to_messages(scheduler.num_steps, events, None))
            self._observe()  # what came before them
            self._metrics.observe_events(events, now)
        assert busy or not scheduler.has_requests, "there are requests, and nothing runs"
        return busy

    def tidy(self) -> None:
        """Do what the last step left for when nobody waits for tokens: free what it held, measure it."""
        self.scheduler.reclaim()
        self._observe()

    def _collect(self) -> None:
        """Wait for the oldest step in flight and pass on what it made."""
        self._observe()
        result = self._runner.collect()
        plan, launched = self._in_flight.popleft()
        now = time.monotonic()
        events = self.scheduler.commit(plan, result)
        self._deliver(to_messages(plan.step, events, result))
        self._unobserved = plan, launched, now, events
        self._busy_since = now if self._in_flight else None

    def _observe(self) -> None:
        """Measure the step that was committed last. Not at once: its tokens, and the next step, would wait for it."""
        if self._unobserved is None:
            return
        plan, launched, now, events = self._unobserved
        self._unobserved = None
        # With two in flight a step begins on the device when the one before is done.
        self._longest.add(now, now - max(launched, self._last_commit))
        self._last_commit = now
        self._metrics.observe_step(plan.num_tokens, now - launched)
        self._metrics.observe_events(events, now)

    def _drain_inbox(self, now: float) -> None:
        for arrival in self._inbox.take():
            match arrival:
                case Submitted(owner, submit):
                    self.scheduler.add(owner, submit, now)
                case Aborted(owner, handle):
                    self.scheduler.abort(owner, handle)
                case OwnerLost(owner):
                    self.scheduler.abort_owner(owner)
                case Drain(deadline):
                    self._draining = True
                    self._drain_deadline = deadline
