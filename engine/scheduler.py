"""Which request computes which positions in the next step, and what a step's result means for each.

There are no phases: a request has known tokens and computed positions, and every step lets the
second catch up with the first under a token budget, decodes before prefill chunks, and few of
the latter where there are decodes, whose streams would wait. Blocks for
all known tokens are taken when a request gets its slot, so only decodes ever run short of them.
Up to `Runner.max_in_flight` steps may be planned and not committed. Knows neither sockets nor
tensors, nor what time it is.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque

from engine.config import Resolved
from engine.events import Ended, Entered, Event, Sampled, Scored
from engine.plan import PlanEntry, Scoring, SlotState, StepPlan, StepResult
from engine.prefix import PrefixCache
from engine.request import Request, RequestKey, RequestState
from engine.sharing import Sharing
from engine.status import Counts
from protocol.messages import Admitted, ErrorCode, Failure, FinishReason, Logprobs, Submit


class Scheduler:
    """Owns all requests, the block pool and the slots."""

    def __init__(self, resolved: Resolved) -> None:
        info = resolved.info
        self.counts = Counts()
        self._max_num_batched_tokens = resolved.max_num_batched_tokens
        self._max_num_prefill_tokens = resolved.max_num_prefill_tokens
        self._prefix_caching = resolved.enable_prefix_caching
        self._block_size = info.block_size
        self._context_length = info.context_length
        self._eos_ids = info.eos_ids
        self._prefix = PrefixCache(info.num_blocks)
        self._pool = self._prefix.pool
        self._sharing = Sharing(self._prefix, info.block_size)
        self._slots = list(range(resolved.max_num_seqs - 1, -1, -1))
        self._requests: dict[RequestKey, Request] = {}
        self._waiting: list[Request] = []  # sorted by Request.order
        self._running: list[Request] = []  # sorted by Request.order
        # Preempted or ended, but held by a step in flight, or until the next is planned: their blocks and slots are
        # not free yet.
        self._leaving: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._in_flight: deque[list[tuple[Request, PlanEntry]]] = deque()
        self._events: list[Event] = []
        self._num_arrived = 0
        self._num_planned = 0

    # --- state that others show ------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a request could get, cached ones included."""
        return self._pool.num_available

    @property
    def num_steps(self) -> int:
        """Steps committed."""
        return self._num_planned - len(self._in_flight)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Assert the invariants of blocks and slots."""
        holders = self._running + self._leaving
        self._pool.check(request.blocks for request in holders)
        slots = sorted(self._slots + [request.slot for request in holders])
        assert slots == list(range(len(slots))), "a slot is lost or held twice"
        assert all(not r.blocks for r in self._waiting), "a waiting request owns blocks"
        self._prefix.check_coming({r.order for r in self._running})
        live = {r.key for r in self._running + self._waiting}
        live |= {r.key for r in self._leaving if r.state is RequestState.PREEMPTED}
        assert live == self._requests.keys(), "a request is lost"

    # --- arrivals and departures -----------------------------------------------------------------

    def add(self, owner: int, submit: Submit, now: float) -> None:
        """Take in a Submit that `engine.admission` let pass. Its key must not be live."""
        self._num_arrived += 1
        request = Request(
            owner,
            submit,
            eos_ids=self._eos_ids,
            context_length=self._context_length,
            sequence=self._num_arrived,
            now=now,
        )
        assert request.key not in self._requests, f"handle {submit.handle} is live"
        self._requests[request.key] = request
        insort(self._waiting, request, key=_order)
        if verdict := request.verdict():
            # Nothing left to generate: max_tokens 0, or a resumed choice that was complete.
            if request.is_scored:
                reason, stop_id = verdict
                self._end(request, reason, stop_id=stop_id)
                return
            request.limit = len(request.ids)
        if submit.leader and submit.group is not None and self._prefix_caching:
            self._sharing.lead(request)
        if submit.deadline_ms:
            heapq.heappush(self._deadlines, (request.deadline, self._num_arrived, request))

    def abort(self, owner: int, handle: int) -> None:
        """End a request if it is live; one that has just ended needs nothing."""
        request = self._requests.get((owner, handle))
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def abort_owner(self, owner: int) -> None:
        """End all requests of a gateway that is gone."""
        for key in [key for key in self._requests if key[0] == owner]:
            self.abort(*key)

    def fail_all(self, code: ErrorCode, text: str) -> None:
        """End every request with an error."""
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, error=Failure(code, text))

    def expire(self, now: float) -> None:
        """End the requests whose deadline is past."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if request.state is not RequestState.ENDED:
                text = f"deadline_ms {request.submit.deadline_ms} passed after {request.num_generated} tokens."
                self._end(request, FinishReason.ERROR, error=Failure(ErrorCode.DEADLINE, text))

    # --- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before another step commits."""
        self.reclaim()
        budget = self._max_num_batched_tokens
        chosen: list[tuple[Request, PlanEntry]] = []
        preemptions = self.counts.preemptions
        chunks: list[Request] = []
        for request in self._running[:]:
            if request.state is not RequestState.RUNNING:
                continue  # preempted by one before it
            num_uncomputed = request.num_uncomputed
            if num_uncomputed > 1:
                chunks.append(request)
            elif num_uncomputed and budget and self._has_room(request):
                chosen.append((request, self._entry(request, 1)))
                budget -= 1
        if chosen:
            chosen.sort(key=_longest_first)
            # Beside decodes all rows count, lest products take the next tile of rows; half is the prompts' in any case.
            most = self._max_num_prefill_tokens
            budget = min(budget, max(most - len(chosen), (most + 1) // 2))
        for request in chunks:
            if budget and request.state is RequestState.RUNNING:
                count = min(request.num_uncomputed, budget)
                chosen.append((request, self._entry(request, count)))
                budget -= count
        entered: list[SlotState] = []
        # After a preemption nobody enters: what blocks are left belong to those that go on.
        while budget and self._slots and preemptions == self.counts.preemptions:
            newcomer = self._next_waiting()
            if newcomer is None or not self._enter(newcomer, now):
                break
            entered.append(newcomer.slot_state())
            count = min(newcomer.num_uncomputed, budget)
            chosen.append((newcomer, self._entry(newcomer, count)))
            budget -= count
        if not chosen:
            return None
        self._num_planned += 1
        self._in_flight.append(chosen)
        # Of a list: each tuple grown from a generator leaves one more in CPython's free lists, up to 2,000 a length.
        return StepPlan(self._num_planned, tuple(entered), tuple([entry for _, entry in chosen]))

    def reclaim(self) -> None:
        """Vacate what committed steps no longer hold. Not as they commit: their tokens go out first."""
        if self._leaving:
            for request in [request for request in self._leaving if not request.in_flight]:
                self._leaving.remove(request)
                self._vacate(request)

    def _entry(self, request: Request, count: int) -> PlanEntry:
        """Plan the next `count` positions; the token after them is sampled if they are the last there are."""
        start, num_told, num_blocks = request.num_planned, request.num_told, len(request.blocks)
        end = start + count
        sample = end == len(request.ids) + request.num_pending
        entry = PlanEntry(
            slot=request.slot,
            start=start,
            count=count,
            ids=request.ids[start:end],
            new_blocks=tuple(request.blocks[num_told:]) if num_told < num_blocks else (),
            sample=sample,
            scoring=None if request.is_scored else request.score(start, end),
        )
        request.num_told = num_blocks
        request.num_planned = end
        request.num_pending += sample
        request.in_flight += 1
        return entry

    def _has_room(self, request: Request) -> bool:
        """Own the block of the next position, if need be by preemption; False when that has to wait."""
        if request.num_planned < len(request.blocks) * self._block_size:
            return True
        while not self._pool.num_available:
            if self._leaving:
                return False  # their blocks come free for the plan after the step in flight
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self._pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        """Take slot and blocks away; it will compute its known tokens again."""
        self.counts.preemptions += 1
        request.state = RequestState.PREEMPTED
        self._running.remove(request)
        self._leave(request)

    def _next_waiting(self) -> Request | None:
        """The first that does not wait for blocks that another computes."""
        for request in self._waiting:
            if not self._prefix_caching or not self._sharing.holds_back(request):
                return request
        return None

    def _enter(self, request: Request, now: float) -> bool:
        """Give a waiting request a slot and blocks for all it has to compute, if there are enough."""
        size, num_to_compute = self._block_size, request.num_to_compute
        hits = self._prefix.match(self._sharing.cacheable(request)) if self._prefix_caching else []
        num_new = -(-num_to_compute // size) - len(hits)
        # A spare block for each running request, which may need it in the next steps: without it a
        # newcomer is often preempted as soon as it has entered.
        if not self._pool.acquire(hits, leaving=num_new + len(self._running)):
            return False
        request.blocks = hits + self._pool.allocate(num_new)
        request.num_told = 0
        request.slot = self._slots.pop()
        request.state = RequestState.RUNNING
        # Of a prompt that is cached to its end the last token alone is computed, anew: what it writes to its
        # block, which others may be reading, is there already (with --no-reproducible its like).
        request.num_planned = request.num_computed = min(len(hits) * size, num_to_compute - 1)
        self._waiting.remove(request)
        insort(self._running, request, key=_order)
        if self._prefix_caching:
            self._prefix.announce(request.hashes[1 + len(hits) :], request.order)
        if request.num_cached is None:
            self._count_entry(request, now)
        return True

    def _count_entry(self, request: Request, now: float) -> None:
        request.num_cached = min(request.num_computed, request.num_prompt)
        self.counts.prompt += request.num_prompt
        self.counts.prefix_queries += request.num_prompt
        self.counts.prefix_hits += request.num_cached
        queue_ms = round((now - request.arrived) * 1000)
        self._events.append(Entered(request.owner, Admitted(request.handle, request.num_cached, queue_ms), now))

    # --- results ---------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take the result of the oldest step in flight; all events since they were last taken."""
        assert plan.step == result.step == self.num_steps + 1, "steps commit in the order they were planned"
        failures = dict(result.failed)
        row = scored_row = 0
        for request, entry in self._in_flight.popleft():
            scoring = entry.scoring
            if request.state is not RequestState.ENDED:
                self._computed(request, entry.start + entry.count)
                going_on = scoring is None or self._scored(request, scoring, scored_row, result.scored)
                if entry.sample and going_on:
                    self._sampled(request, result.ids[row], row, failures.get(row))
            row += entry.sample
            scored_row += 0 if scoring is None else len(scoring.ids)
            request.in_flight -= 1
        return self.take_events()

    def _computed(self, request: Request, num_computed: int) -> None:
        """Positions up to `num_computed` are in the pool: name the blocks that became full."""
        size = self._block_size
        first, last = request.num_computed // size, num_computed // size
        request.num_computed = num_computed
        if last > first and self._prefix_caching:
            if len(request.hashes) <= last:
                request.extend_hashes(size)
            for index in range(first, last):
                self._prefix.insert(request.hashes[index + 1], request.blocks[index])
        if num_computed >= request.num_prompt:
            self._sharing.unlead(request)

    def _scored(self, request: Request, scoring: Scoring, row: int, scored: Logprobs | None) -> bool:
        """Tell a prompt's logprobs, from row `row` on; False if the request ended by or with them."""
        failure = None
        if scored is None:
            failure = Failure(ErrorCode.BAD_REQUEST, "This engine's backend gives no logprobs of prompts.")
        elif math.isnan(sum(scored.own[row : row + len(scoring.ids)])):  # as soon as one is; none is +inf
            failure = Failure(ErrorCode.INTERNAL, "the model's logits were not finite")
        if failure is not None:
            self._end(request, FinishReason.ERROR, error=failure)
            return False
        self._events.append(Scored(request, scoring, row))
        is_last = scoring.first + len(scoring.ids) == request.num_prompt
        if is_last and (verdict := request.verdict()):
            reason, stop_id = verdict
            self._end(request, reason, stop_id=stop_id)
            return False
        return True

    def _sampled(self, request: Request, token: int, row: int, failure: str | None) -> None:
        request.num_pending -= 1
        if failure is not None:
            self._end(request, FinishReason.ERROR, error=Failure(ErrorCode.INTERNAL, failure))
            return
        ids = request.ids
        self._events.append(Sampled(request, len(ids) - request.num_prompt, token, row))
        self.counts.generated += 1
        ids.append(token)
        if verdict := request.verdict():
            reason, stop_id = verdict
            self._end(request, reason, stop_id=stop_id)

    def _end(
        self, request: Request, reason: FinishReason, *, stop_id: int | None = None, error: Failure | None = None
    ) -> None:
        """The one way out: terminal event; what it owns is free now, or for the first plan when no step holds it."""
        state = request.state
        finished = request.finish(reason, stop_id=stop_id, error=error)
        self._events.append(Ended(request.owner, finished))
        self.counts.finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.counts.aborted += reason is FinishReason.ABORT
        del self._requests[request.key]
        self._sharing.unlead(request)
        if state is RequestState.WAITING:
            self._waiting.remove(request)
        elif state is RequestState.RUNNING:
            self._running.remove(request)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if self._prefix_caching:
            self._prefix.renounce(request.hashes[1 + request.num_computed // self._block_size :], request.order)
        if request.in_flight:
            self._leaving.append(request)
        else:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """No planned step holds it any more: free its slot and blocks; a preempted one waits again."""
        self._pool.release(request.blocks)
        request.blocks = []
        self._slots.append(request.slot)
        if request.state is RequestState.PREEMPTED:
            request.restart()
            insort(self._waiting, request, key=_order)


def _order(request: Request) -> tuple[int, bool, int]:
    return request.order


def _longest_first(chosen: tuple[Request, PlanEntry]) -> int:
    """A device computes single tokens side by side: none that takes long should be the last to begin."""
    return -chosen[1].start
