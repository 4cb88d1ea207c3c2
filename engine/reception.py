"""The engine's end of the protocol: greets gateways, checks what they send, keeps their accounts.

Every frame is answered here or passed on to the step loop; a peer that breaks the protocol loses
its account, never the process. Runs on the I/O thread; knows no socket, only a function that
sends one frame.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.accounts import Account, Grant, share
from engine.admission import refusal
from engine.config import Resolved
from engine.events import Delivery
from engine.inbox import Aborted, Inbox, OwnerLost, Submitted
from engine.mailbox import Mailbox, PeerGone, Sent
from engine.status import Status
from protocol import bundle
from protocol.codec import WireError, decode_from_gateway, encode
from protocol.messages import (
    PROTOCOL,
    SILENCE_MS,
    Abort,
    Admitted,
    BundleRequest,
    EngineBeat,
    ErrorCode,
    Failure,
    Finished,
    FinishReason,
    GatewayBeat,
    Hello,
    Phase,
    PromptLogprobs,
    Reject,
    RejectCode,
    Role,
    Serving,
    Step,
    Submit,
    Welcome,
)
from protocol.sampling import MAX_LOGPROBS

log = logging.getLogger(__name__)

#: An account is dropped when this much waits for its gateway, or for so long.
MAX_MAIL_BYTES, MAX_STUCK_S = 8 * 2**20, 5.0

#: A tick that comes this late means that this process stood still, so silence proves nothing.
LATE_TICK_S = 1.0

#: Connections remembered as dropped, so that their late frames are answered with the reason.
NUM_LOST_KEPT = 1024

#: Characters of a Reject's text, so that it fits its frame whatever they are.
MAX_REJECT_TEXT = 500


class Reception:
    """All accounts of one engine life.

    `send` passes (identity, frame) to the socket without blocking.
    """

    def __init__(
        self,
        engine_id: str,
        epoch: int,
        send: Callable[[bytes, bytes], Sent],
        inbox: Inbox,
    ) -> None:
        self.phase = Phase.LOADING
        self.num_rejected = 0  # frames of connections that have no account, or lost it by them
        self._engine_id = engine_id
        self._epoch = epoch
        self._send = send
        self._inbox = inbox
        self._resolved: Resolved | None = None
        self._serving: Serving | None = None
        self._accounts: dict[bytes, Account] = {}
        self._by_number: dict[int, Account] = {}
        self._lost: OrderedDict[bytes, bytes] = OrderedDict()  # what a late frame is answered with
        self._num_greeted = 0
        self._beat = 0
        self._ticked = time.monotonic()

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    @property
    def is_stuck(self) -> bool:
        """Whether some gateway's mail waits for its socket."""
        return any(not account.mailbox.is_empty for account in self._accounts.values())

    # --- from gateways ---------------------------------------------------------------------------

    def receive(self, identity: bytes, frame: bytes) -> None:
        """One frame of one connection."""
        if (reject := self._lost.get(identity)) is not None:
            self.num_rejected += 1
            # Nobody is left to be told: the rest is only read, which frees what libzmq keeps for it.
            if reject and self._send(identity, reject) is Sent.GONE:
                self._lost[identity] = b""
            return
        now = time.monotonic()
        account = self._accounts.get(identity)
        try:
            message = decode_from_gateway(frame)
        except WireError as error:
            if account is None:
                self._turn_away(identity, RejectCode.HELLO_REQUIRED, f"The first frame must be a Hello: {error}")
            else:
                self._malformed(account, error)
            return
        if account is None:
            self._stranger(identity, message, now)
            return
        account.heard = now
        match message:
            case Submit():
                self._submit(account, message, now)
            case Abort(handle=handle):
                if account.has(handle):
                    self._inbox.put(Aborted(account.number, handle))
            case BundleRequest(sha256=name):
                self._request_bundle(account, name)
            case Hello():
                self._drop(account, RejectCode.PROTOCOL, "A connection has one Hello; this was its second.")
            case GatewayBeat() | None:
                pass  # a sign of life, or a kind of a later minor version
        self._flush(account, now)

    def _stranger(self, identity: bytes, message: object, now: float) -> None:
        if not isinstance(message, Hello):
            self._turn_away(identity, RejectCode.HELLO_REQUIRED, "The first frame of a connection must be a Hello.")
        elif message.protocol[0] != PROTOCOL[0]:
            text = f"This engine speaks protocol {PROTOCOL[0]}.x, the gateway {message.protocol[0]}.x."
            self._turn_away(identity, RejectCode.PROTOCOL, text)
        elif message.role is not Role.GATEWAY:
            self._turn_away(identity, RejectCode.ROLE, f"This engine has no place for the role {message.role}.")
        else:
            self._greet(identity, message, now)

    def _turn_away(self, identity: bytes, code: RejectCode, text: str) -> None:
        self.num_rejected += 1
        self._send(identity, _reject(code, text))

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        self._num_greeted += 1
        mailbox = Mailbox(partial(self._send, identity))
        account = Account(self._num_greeted, identity, hello.name, mailbox, now)
        self._accounts[identity] = self._by_number[account.number] = account
        log.info("gateway_connected", extra={"gateway": hello.name, "account": account.number, "build": hello.build})
        if self._resolved is not None:
            account.set_grant(share(self._resolved, len(self._accounts)), now)
        mailbox.put(self._welcome(account, minor=min(hello.protocol[1], PROTOCOL[1])))
        self._flush(account, now)

    def _submit(self, account: Account, submit: Submit, now: float) -> None:
        if account.has(submit.handle):
            text = f"Submit: handle {submit.handle} is in use until its Finished."
            self._drop(account, RejectCode.PROTOCOL, text)
            return
        failure = self._failure(account, submit, now)
        if failure is not None:
            self._refuse(account, submit.handle, len(submit.prompt_ids), len(submit.generated_ids), failure)
            return
        account.submitted(submit)
        self._inbox.put(Submitted(account.number, submit))

    def _failure(self, account: Account, submit: Submit, now: float) -> Failure | None:
        if self._resolved is None:
            return Failure(ErrorCode.OVERLOADED, "The engine is still loading.")
        if self.phase is Phase.DRAINING:
            return Failure(ErrorCode.DRAINING, "The engine shuts down.")
        if submit.resume:
            most, waiting = 2 * self._resolved.max_num_seqs, sum(a.num_resuming for a in self._accounts.values())
            if waiting >= most:
                return Failure(ErrorCode.OVERLOADED, f"{waiting} resumed requests wait; {most} may.")
        return account.beyond_grant(submit, now) or refusal(submit, self._resolved)

    def _refuse(self, account: Account, handle: int, num_prompt: int, num_generated: int, failure: Failure) -> None:
        log.debug("submit_refused", extra={"account": account.number, "code": failure.code, "text": failure.text})
        account.mailbox.put(Finished(handle, FinishReason.ERROR, num_prompt, 0, num_generated, error=failure))

    def _malformed(self, account: Account, error: WireError) -> None:
        """A Submit that can be named is refused; a peer that talks nonsense loses its account."""
        handle = error.submit_handle
        if handle is None or account.has(handle):
            self._drop(account, RejectCode.PROTOCOL, str(error))
        else:
            self._refuse(account, handle, 0, 0, Failure(ErrorCode.BAD_REQUEST, str(error)))
            self._flush(account, time.monotonic())

    def _request_bundle(self, account: Account, name: str) -> None:
        serving = self._serving
        if self._resolved is None or serving is None or name != serving.bundle:
            self._drop(account, RejectCode.PROTOCOL, f"BundleRequest: this engine has no bundle {name}.")
        else:
            account.mailbox.put_bundle(self._resolved.info.bundle)

    # --- from the step loop ----------------------------------------------------------------------

    def serve(self, resolved: Resolved) -> None:
        """The model is loaded: welcome everybody again, with what there is."""
        now = time.monotonic()
        info = resolved.info
        self._resolved = resolved
        self._serving = Serving(
            model=resolved.public_name,
            version=info.digest[:12],
            digest=info.digest,
            numerics=info.numerics,
            bundle=bundle.sha256(info.bundle),
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=resolved.max_num_seqs,
            eos_ids=info.eos_ids,
            generation_defaults=info.generation_defaults,
            grant_requests=0,
            grant_tokens=0,
            max_logprobs=MAX_LOGPROBS,
            hang_timeout_ms=resolved.hang_timeout_ms,
        )
        self.phase = Phase.SERVING
        self._share(now)
        for account in list(self._accounts.values()):
            account.mailbox.put(self._welcome(account, minor=PROTOCOL[1]))
            self._flush(account, now)

    def drain(self, status: Status) -> None:
        """From now on nothing is admitted; tell everybody at once."""
        self.phase = Phase.DRAINING
        self._send_beats(status, time.monotonic())

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Messages of the step loop; those for a gateway that is gone are dropped."""
        now = time.monotonic()
        touched: dict[int, Account] = {}
        for number, message in deliveries:
            account = self._by_number.get(number)
            if account is None:
                continue
            touched[number] = account
            match message:
                case Admitted(handle=handle):
                    account.admitted(handle)
                case Finished(handle=handle):
                    account.finished(handle)
                case PromptLogprobs() | Step():
                    pass
            account.mailbox.put(message)
        for account in touched.values():
            self._flush(account, now)

    # --- time ------------------------------------------------------------------------------------

    def tick(self, status: Status) -> None:
        """Every 250 ms: beat, and drop whom nobody hears."""
        now = time.monotonic()
        stood_still = now - self._ticked
        self._ticked = now
        for account in list(self._accounts.values()):
            if stood_still > LATE_TICK_S:
                account.heard += stood_still
            if now - account.heard > SILENCE_MS / 1000:
                self._drop(account, RejectCode.ACCOUNT_LOST, f"Nothing came from the gateway for {SILENCE_MS} ms.")
        self._send_beats(status, now)

    def retry(self) -> None:
        """Try again what sockets refused."""
        now = time.monotonic()
        for account in list(self._accounts.values()):
            if not account.mailbox.is_empty:
                self._flush(account, now)

    def _send_beats(self, status: Status, now: float) -> None:
        self._beat += 1
        self._share(now)
        for account in list(self._accounts.values()):
            if account.mailbox.is_empty:  # else it would only be late
                account.mailbox.put(self._engine_beat(account.grant, status, now))
            self._flush(account, now)

    def _engine_beat(self, grant: Grant, status: Status, now: float) -> EngineBeat:
        return EngineBeat(
            seq=self._beat,
            phase=self.phase,
            step=status.step,
            step_age_ms=0 if status.busy_since is None else max(0, round((now - status.busy_since) * 1000)),
            longest_step_ms=round(status.longest_step_s * 1000),
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            grant_requests=grant.requests,
            grant_tokens=grant.tokens,
            totals=status.totals,
        )

    # --- accounts --------------------------------------------------------------------------------

    def _share(self, now: float) -> None:
        if self._resolved is not None and self._accounts:
            grant = share(self._resolved, len(self._accounts))
            for account in self._accounts.values():
                account.set_grant(grant, now)

    def _welcome(self, account: Account, minor: int) -> Welcome:
        serving = self._serving
        if serving is not None:
            grant = account.grant
            serving = replace(serving, grant_requests=grant.requests, grant_tokens=grant.tokens)
        return Welcome((PROTOCOL[0], minor), self._engine_id, self._epoch, self.phase, serving)

    def _flush(self, account: Account, now: float) -> None:
        """Send an account's mail as far as its socket takes it; drop the account of a lost gateway."""
        if account.identity not in self._accounts:
            return
        mailbox = account.mailbox
        try:
            mailbox.flush(now)
        except PeerGone:
            self._drop(account, RejectCode.ACCOUNT_LOST, "The connection ended.")
            return
        stuck_s = 0.0 if mailbox.stuck_since is None else now - mailbox.stuck_since
        if mailbox.size > MAX_MAIL_BYTES or stuck_s > MAX_STUCK_S:
            text = f"The gateway read nothing for {stuck_s:.1f} s and {mailbox.size} bytes wait for it."
            self._drop(account, RejectCode.ACCOUNT_LOST, text)

    def _drop(self, account: Account, code: RejectCode, text: str) -> None:
        """Forget a gateway and end its requests; what comes from the connection later is rejected."""
        self.num_rejected += 1
        # A gateway that stops goes like this, without a word: worth a warning where work was lost.
        is_harmless = code is RejectCode.ACCOUNT_LOST and not account.num_live
        log.log(
            logging.INFO if is_harmless else logging.WARNING,
            "gateway_dropped",
            extra={"gateway": account.name, "account": account.number, "reason": text, "requests": account.num_live},
        )
        del self._accounts[account.identity], self._by_number[account.number]
        self._lost[account.identity] = _reject(RejectCode.ACCOUNT_LOST, text)
        if len(self._lost) > NUM_LOST_KEPT:
            self._lost.popitem(last=False)
        self._inbox.put(OwnerLost(account.number))
        self._send(account.identity, _reject(code, text))


def _reject(code: RejectCode, text: str) -> bytes:
    """The frame that tells a connection why it is not served."""
    return encode(Reject(code, text[:MAX_REJECT_TEXT]))
