"""An engine played by a test, and a gateway's links over it.

async with ScriptedEngine(address) as engine, linked(address, tmp_path) as gateway:
    generation = await gateway.start(prompt=[1, 2, 3])
    submit = await engine.next(Submit)
    engine.say_step({submit.handle: (0, [7, 8])})
    engine.say_finished(submit.handle, num_generated=2)
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq
from prometheus_client import CollectorRegistry

from gateway.engines import LinkSettings
from gateway.generation import Generation
from gateway.resume import Dispatcher, DispatchSettings
from gateway.router import Router, RouterSettings
from gateway.stream import Delta, GenerationRequest
from protocol import bundle, metrics
from protocol.codec import decode_from_gateway, encode
from protocol.messages import (
    U16,
    Abort,
    Admitted,
    EngineBeat,
    ErrorCode,
    Failure,
    Finished,
    FinishReason,
    FromEngine,
    FromGateway,
    GatewayBeat,
    Hello,
    Logprobs,
    Phase,
    Serving,
    Step,
    Welcome,
    u32,
)
from protocol.sampling import SamplingParams

#: Nothing here takes longer on an idle machine than some milliseconds.
PATIENCE_S = 10.0
BEAT_S = 0.02
_POLL_S = 0.001

BUNDLE = bundle.pack({"tokenizer.json": "{}"})
UNDECODABLE = 999
EOS = 500  # "g" where it is shown

SERVING = Serving(
    model="model",
    version="1",
    digest="digest",
    numerics="numerics",
    bundle=bundle.sha256(BUNDLE),
    vocab_size=1000,
    context_length=512,
    block_size=16,
    num_blocks=64,
    max_num_seqs=8,
    eos_ids=(EOS,),
    generation_defaults={},
    grant_requests=16,
    grant_tokens=2048,
    max_logprobs=20,
    hang_timeout_ms=10_000,
)

#: What an idle engine says of itself.
IDLE = EngineBeat(
    seq=0,
    phase=Phase.SERVING,
    step=0,
    step_age_ms=0,
    longest_step_ms=10,
    running=0,
    waiting=0,
    free_blocks=64,
    grant_requests=SERVING.grant_requests,
    grant_tokens=SERVING.grant_tokens,
)

M = TypeVar("M", bound=FromGateway)


class ScriptedEngine:
    """One life of an engine: a ROUTER that greets and beats by itself; all else a test says.

    With `serving` None it is loading. Frames go to the connection that said Hello last.
    """

    _epochs = itertools.count(1)

    def __init__(self, address: str, serving: Serving | None = SERVING, *, greets: bool = True) -> None:
        self.address = address
        self.serving = serving
        self.beat = IDLE if serving is None else with_grants(IDLE, serving)
        self.beats = True
        self.peers: list[bytes] = []
        self._greets = greets
        self._epoch = next(self._epochs)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._inbox: defaultdict[type, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._socket.bind(self.address)
        self.bound_address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_beating())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """As by `kill -9`."""
        if not self._socket.closed:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._socket.close()
            self._context.term()

    async def _read(self) -> None:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(_POLL_S)
                continue
            message = decode_from_gateway(frame)
            if isinstance(message, Hello):
                self.peers.append(identity)
                if self._greets:
                    self.welcome()
            if isinstance(message, GatewayBeat) and self._inbox[GatewayBeat].qsize():
                continue  # one is enough to show that they come
            self._inbox[type(message)].put_nowait(message)

    async def _keep_beating(self) -> None:
        for seq in itertools.count():
            if self.beats and self.peers:
                self.say(replace(self.beat, seq=seq))
            await asyncio.sleep(BEAT_S)

    # --- what it hears ---------------------------------------------------------------------------

    async def next(self, kind: type[M]) -> M:
        """The next message of a kind."""
        async with asyncio.timeout(PATIENCE_S):
            message: M = await self._inbox[kind].get()
        return message

    def heard(self, kind: type[FromGateway]) -> int:
        """Messages of a kind that came and were not asked for with `next`."""
        return self._inbox[kind].qsize()

    # --- what it says ----------------------------------------------------------------------------

    def say(self, message: FromEngine) -> None:
        self.say_frame(encode(message))

    def say_frame(self, frame: bytes) -> None:
        self.say_frame_to(self.peers[-1], frame)

    def say_frame_to(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # a gateway that is gone
                raise

    def welcome(self) -> None:
        phase = Phase.LOADING if self.serving is None else Phase.SERVING
        self.say(Welcome((1, 0), "scripted", self._epoch, phase, self.serving))

    def say_step(self, tokens: Mapping[int, tuple[int, Sequence[int]]], logprobs: Logprobs | None = None) -> None:
        """`tokens`: for each handle the index of the first and the ids."""
        self.say_frame(self.step_frame(tokens, logprobs))

    def step_frame(self, tokens: Mapping[int, tuple[int, Sequence[int]]], logprobs: Logprobs | None = None) -> bytes:
        step = Step(
            1,
            u32(list(tokens)),
            u32([first for first, _ in tokens.values()]),
            array(U16, [len(ids) for _, ids in tokens.values()]),
            u32([token for _, ids in tokens.values() for token in ids]),
            logprobs,
        )
        return encode(step)

    def say_admitted(self, handle: int, cached_tokens: int = 0) -> None:
        self.say(Admitted(handle, cached_tokens, 0))

    def say_finished(
        self,
        handle: int,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        num_generated: int = 0,
        stop_id: int | None = None,
    ) -> None:
        self.say(Finished(handle, reason, 1, 0, num_generated, stop_id))

    def say_refused(self, handle: int, code: ErrorCode, text: str = "refused") -> None:
        self.say(Finished(handle, FinishReason.ERROR, 1, 0, 0, error=Failure(code, text)))

    async def end_aborted(self) -> Abort:
        """Wait for an Abort and answer it."""
        abort = await self.next(Abort)
        self.say_finished(abort.handle, FinishReason.ABORT)
        return abort


def with_grants(beat: EngineBeat, serving: Serving) -> EngineBeat:
    return replace(beat, grant_requests=serving.grant_requests, grant_tokens=serving.grant_tokens)


class _LetterJson(dict[int, bytes | None]):
    def __missing__(self, token_id: int) -> bytes | None:
        return None if token_id == UNDECODABLE else b'"%c"' % (ord("a") + token_id % 26)


class Letters:
    """A decoder of token i to the letter number i modulo 26; UNDECODABLE is none."""

    def __init__(self, prompt_ids: array[int]) -> None:
        self.prompt_ids = prompt_ids
        self.next_json = _LetterJson()

    def push(self, token_id: int) -> str:
        if token_id == UNDECODABLE:
            raise ValueError("no such token")
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""


@dataclass(frozen=True)
class Gateway:
    router: Router
    dispatcher: Dispatcher
    registry: CollectorRegistry
    crashes: list[None]

    async def start(self, prompt: Sequence[int] = (1, 2, 3), *more: Sequence[int], **fields: Any) -> Generation:
        """A generation of up to 100 tokens, once the model is served."""
        await until(lambda: self.router.ready)
        return await self.dispatcher.start(request(prompt, *more, **fields))

    def resumes(self, *, exact: bool) -> float:
        value = self.registry.get_sample_value("sluicegate:resumes_total", {"exact": str(exact).lower()})
        return value or 0.0


def request(*prompts: Sequence[int], **fields: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "request_id": "request",
        "model": "model",
        "prompts": tuple(u32(prompt) for prompt in prompts or [(1, 2, 3)]),
        "sampling": SamplingParams(max_tokens=100),
        "decoder": Letters,
        "seed": 7,
    }
    return GenerationRequest(**(values | fields))


@asynccontextmanager
async def linked(
    *addresses: str,
    cache_dir: Path,
    link: LinkSettings | None = None,
    dispatch: DispatchSettings | None = None,
) -> AsyncIterator[Gateway]:
    """Router and dispatcher over engines at `addresses`, closed at the end."""
    registry = CollectorRegistry()
    instruments = metrics.build(metrics.Owner.GATEWAY, registry)
    crashes: list[None] = []

    def on_crash() -> None:
        crashes.append(None)

    router = Router(
        RouterSettings(addresses, cache_dir, link or LinkSettings(beat_s=BEAT_S)), instruments, on_crash=on_crash
    )
    dispatcher = Dispatcher(router, dispatch or DispatchSettings(), instruments, on_crash=on_crash)
    await router.start()
    try:
        yield Gateway(router, dispatcher, registry, crashes)
    finally:
        await dispatcher.close()
        await router.close()
    assert not crashes


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def next_delta(generation: Generation) -> Delta:
    async with asyncio.timeout(PATIENCE_S):
        delta = await generation.next()
    assert delta is not None
    return delta


async def read_all(generation: Generation) -> dict[int, tuple[str, list[int], Delta]]:
    """Text, ids and last delta of every choice."""
    texts: dict[int, tuple[str, list[int], Delta]] = {}
    async with asyncio.timeout(PATIENCE_S):
        async for delta in generation:
            text, ids, _ = texts.get(delta.index, ("", [], delta))
            texts[delta.index] = (text + delta.text, ids + list(delta.ids), delta)
    return texts
