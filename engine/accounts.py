"""What an engine knows of each connected gateway: its requests, its credit, its sign of life."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import Resolved
from engine.mailbox import Mailbox
from protocol.messages import ErrorCode, Failure, Submit

#: A grant that was lowered still holds for so long, since Submits under it may be on their way.
GRANT_GRACE_S = 1.0

#: However many gateways share an engine, each may have this many requests (and one context of prompt ids).
LEAST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Grant:
    """How many requests a gateway may have here, and how many prompt ids waiting for a slot."""

    requests: int = 0
    tokens: int = 0


def share(resolved: Resolved, num_gateways: int) -> Grant:
    """The grant of each of `num_gateways`."""
    context = resolved.info.context_length
    return Grant(
        requests=max(2 * resolved.max_num_seqs // num_gateways, LEAST_REQUESTS),
        tokens=max(max(4 * context, 64 * resolved.max_num_batched_tokens) // num_gateways, context),
    )


class Account:
    """One connection of one gateway. `number` names it to the step loop and is never used again."""

    def __init__(self, number: int, identity: bytes, name: str, mailbox: Mailbox, now: float) -> None:
        self.number = number
        self.identity = identity
        self.name = name
        self.mailbox = mailbox
        self.heard = now  # monotonic seconds of the last frame from it
        self.grant = Grant()
        self._former_grant, self._former_until = Grant(), now
        self._live: dict[int, Submit] = {}
        self._waiting: set[int] = set()
        self._waiting_tokens = 0
        self._num_credited = 0

    def has(self, handle: int) -> bool:
        """Whether a Submit under this handle has not had its Finished."""
        return handle in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_resuming(self) -> int:
        """Resumed requests that wait for a slot."""
        return sum(self._live[handle].resume for handle in self._waiting)

    def set_grant(self, grant: Grant, now: float) -> None:
        if grant != self.grant:
            self._former_grant, self._former_until = self.grant, now + GRANT_GRACE_S
            self.grant = grant

    def beyond_grant(self, submit: Submit, now: float) -> Failure | None:
        """Why this Submit is more than the gateway was granted, None if it is not. Resuming is free."""
        if submit.resume:
            return None
        former = self._former_grant if now < self._former_until else Grant()
        requests = max(self.grant.requests, former.requests)
        if self._num_credited >= requests:
            text = f"{self._num_credited} requests of this gateway are here; {requests} are granted."
            return Failure(ErrorCode.OVERLOADED, text)
        tokens, asked = max(self.grant.tokens, former.tokens), self._waiting_tokens + len(submit.prompt_ids)
        if asked > tokens:
            return Failure(ErrorCode.OVERLOADED, f"{asked} prompt ids would wait; {tokens} are granted.")
        return None

    def submitted(self, submit: Submit) -> None:
        self._live[submit.handle] = submit
        self._waiting.add(submit.handle)
        if not submit.resume:
            self._num_credited += 1
            self._waiting_tokens += len(submit.prompt_ids)

    def admitted(self, handle: int) -> None:
        """The request got a slot: its prompt ids wait no longer."""
        if handle in self._waiting:
            self._waiting.remove(handle)
            if not self._live[handle].resume:
                self._waiting_tokens -= len(self._live[handle].prompt_ids)

    def finished(self, handle: int) -> None:
        """The handle is free, and so is its credit."""
        self.admitted(handle)
        submit = self._live.pop(handle)
        if not submit.resume:
            self._num_credited -= 1
