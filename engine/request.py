"""One choice being generated: its tokens, how far it has come, and the rules by which it ends.

The token rules (end-of-sequence, stop ids, `min_tokens`, `max_tokens`, the end of the context)
are here and nowhere else; rules about text are the gateway's. Knows nothing of other requests.
"""

from __future__ import annotations

import enum
import math
from array import array
from dataclasses import replace

from engine.plan import Scoring, SlotState
from protocol import hashing
from protocol.messages import Failure, Finished, FinishReason, Submit

#: Who sent a request (the account's number) and its handle there: unique among live requests.
RequestKey = tuple[int, int]


class RequestState(enum.Enum):
    """WAITING owns nothing. RUNNING owns a slot and blocks. PREEMPTED will wait again, and ENDED
    be forgotten, once no planned step holds it any more."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    ENDED = enum.auto()


class Request:
    """State of one Submit.

    `ids` are its known tokens, prompt first. `num_planned` positions are computed by steps that
    were planned, `num_computed` by steps that are committed too. `num_pending` tokens are being
    sampled by steps in flight, so `len(ids) + num_pending` tokens exist, known or not. Prompt tokens
    from position `next_scored` on have logprobs that are wanted and that no planned step makes.
    """

    __slots__ = (
        "arrived",
        "awaited",
        "blocks",
        "deadline",
        "handle",
        "hashes",
        "ids",
        "in_flight",
        "limit",
        "next_scored",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_planned",
        "num_prompt",
        "num_told",
        "order",
        "owner",
        "slot",
        "state",
        "stop_ids",
        "submit",
    )

    def __init__(
        self, owner: int, submit: Submit, *, eos_ids: tuple[int, ...], context_length: int, sequence: int, now: float
    ) -> None:
        """`sequence` numbers arrivals; `now` is the monotonic time of this one in seconds."""
        sampling = submit.sampling
        self.owner = owner
        self.handle = submit.handle
        self.submit = submit
        self.ids: array[int] = submit.prompt_ids + submit.generated_ids
        self.num_prompt = len(submit.prompt_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, context_length)
        first = submit.prompt_logprobs_from
        self.next_scored = self.num_prompt if first < 0 else min(max(first, 1), self.num_prompt)
        self.stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids))
        #: Who goes first: lower priority values, then work that had begun before, then the older.
        self.order = (submit.priority, not submit.resume, sequence)
        self.arrived = now
        self.deadline = now + submit.deadline_ms / 1000 if submit.deadline_ms else math.inf
        self.state = RequestState.WAITING
        self.awaited: bytes | None = None  # the block that another computes, while it waits for that
        self.slot = -1
        self.blocks: list[int] = []
        self.hashes = [hashing.root(submit.salt, submit.adapter)]
        self.num_cached: int | None = None  # set when it first gets a slot
        self.num_told = 0  # blocks that the runner's block table has
        self.num_planned = 0
        self.num_computed = 0
        self.num_pending = 0
        self.in_flight = 0

    @property
    def key(self) -> RequestKey:
        return self.owner, self.handle

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether planned steps make all prompt logprobs that are wanted."""
        return self.next_scored == self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Positions to compute for the next token; for prompt logprobs alone when its limit allows none."""
        tokens = len(self.ids) + self.num_pending
        if tokens < self.limit:
            return tokens
        return 0 if self.is_scored else self.num_prompt - 1

    @property
    def num_uncomputed(self) -> int:
        """Of those, how many no planned step computes yet."""
        left = self.num_to_compute - self.num_planned
        return left if left > 0 else 0

    def score(self, start: int, end: int) -> Scoring | None:
        """Plan the prompt logprobs that follow from positions `start` to `end - 1`."""
        first, last = self.next_scored, min(end, self.num_prompt - 1)
        if first > last:
            return None
        assert first > start, "a position whose logprobs are wanted was left out"
        self.next_scored = last + 1
        return Scoring(first, self.ids[first : last + 1], max(self.submit.sampling.prompt_logprobs or 0, 1))

    def extend_hashes(self, block_size: int) -> None:
        """Let `hashes` name all full blocks of the known tokens: block i by `hashes[i + 1]`, after the root."""
        hashes = self.hashes
        hashes += hashing.chain(memoryview(self.ids)[(len(hashes) - 1) * block_size :], block_size, hashes[-1])

    def slot_state(self) -> SlotState:
        """What a runner has to know as the request enters its slot."""
        sampling = self.submit.sampling
        if sampling.logprobs == 0:
            # The wire carries at least one alternative beside the token's own logprob.
            sampling = replace(sampling, logprobs=1)
        return SlotState(
            slot=self.slot,
            prompt_ids=self.submit.prompt_ids,
            generated_ids=self.ids[self.num_prompt :],
            sampling=sampling,
            seed=self.submit.seed,
            masked_until_min=tuple(sorted(self.stop_ids)) if sampling.min_tokens else (),
        )

    def verdict(self) -> tuple[FinishReason, int | None] | None:
        """Reason and stop id if the last known token is the last of all, else None.

        A stop id among the first `min_tokens` does not count: it was masked when sampled.
        """
        ids = self.ids
        if (last := ids[-1]) in self.stop_ids and self.num_generated > self.submit.sampling.min_tokens:
            return FinishReason.STOP, last
        if len(ids) >= self.limit:
            return FinishReason.LENGTH, None
        return None

    def finish(self, reason: FinishReason, *, stop_id: int | None = None, error: Failure | None = None) -> Finished:
        """Mark it ended; its only terminal message."""
        assert self.state is not RequestState.ENDED, "a request ends once"
        self.state = RequestState.ENDED
        return Finished(
            handle=self.handle,
            reason=reason,
            num_prompt=self.num_prompt,
            num_cached=self.num_cached or 0,
            num_generated=self.num_generated,
            stop_id=stop_id,
            error=error,
        )

    def restart(self) -> None:
        """Wait again, with all known tokens still to compute, ahead of new work of its priority."""
        assert not self.in_flight
        assert not self.num_pending
        self.state = RequestState.WAITING
        self.order = (self.order[0], False, self.order[2])
        self.num_planned = self.num_computed = 0
