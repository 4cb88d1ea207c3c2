"""A gateway without engines: the router and the dispatcher replaced by ones a test scripts.

gateway = StubGateway(vocabularies.byte_level(), script=say("hello"))
async with gateway.client() as client: ...
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import httpx
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.app import Access, create_app
from gateway.client import Client
from gateway.errors import GatewayError, ModelNotFound, Unavailable
from gateway.generation import Generation
from gateway.measures import Measures
from gateway.resume import Dispatcher
from gateway.router import Router
from gateway.service import Service
from gateway.stream import Choice, GenerationRequest
from gateway.texts import ModelText, Texts
from protocol import bundle, metrics
from protocol.messages import AbortReason, FinishReason, Logprobs, Serving, f32, u32

#: The ids an engine would make for a choice, given its request and number; an error ends it.
Script = Callable[[GenerationRequest, int], Sequence[int | GatewayError]]

CONTEXT_LENGTH = 2048


class StubRouter:
    """Serves `models`, all with the same bundle."""

    def __init__(self, blob: bytes, serving: Serving) -> None:
        self.blob = blob
        self.served = {serving.model: serving}
        self.num_fetches = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    @property
    def ready(self) -> bool:
        return bool(self.served)

    def models(self) -> list[Serving]:
        return [self.served[name] for name in sorted(self.served)]

    def model_names(self) -> list[str]:
        return sorted(self.served)

    def serving(self, model: str) -> Serving:
        if model in self.served:
            return self.served[model]
        if not self.served:
            raise Unavailable("no engine serves at the moment.")
        raise ModelNotFound(f"the model {model!r} does not exist; this server has {', '.join(self.served)}.")

    async def fetch_bundle(self, sha256: str) -> bytes:
        self.num_fetches += 1
        assert sha256 == bundle.sha256(self.blob)
        return self.blob


class StubDispatcher:
    """Plays a script into each choice, a token at a time, all choices in turn."""

    def __init__(self, script: Script, eos_ids: tuple[int, ...]) -> None:
        self.script = script
        self.eos_ids = eos_ids
        self.requests: list[GenerationRequest] = []
        self.left: list[tuple[int, AbortReason]] = []
        self.cached_tokens = 0
        self.refusal: GatewayError | None = None
        self.returning: Serving | None = None  # what comes 0.05 s after it was asked for
        self.waited_s: list[float] = []  # what each request had waited before
        #: Set: tokens flow. Clear: they wait.
        self.flow = asyncio.Event()
        self.flow.set()
        #: Each token is read before the next is made, so that none are merged.
        self.paced = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def await_serving(self, model: str) -> Serving:
        if self.returning is None:
            raise Unavailable("no engine serves at the moment.")
        await asyncio.sleep(0.05)
        return self.returning

    async def start(self, request: GenerationRequest, waited_s: float = 0.0) -> Generation:
        self.requests.append(request)
        self.waited_s.append(waited_s)
        if self.refusal is not None:
            raise self.refusal
        generation = Generation(request, self.eos_ids)
        for choice in generation.choices:
            choice.carried_by(_Leaving(self, choice))
        task = asyncio.create_task(self._play(request, generation))
        self._tasks.add(task)
        return generation

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def playing(self) -> bool:
        """Whether any script has not been played to its end."""
        return not all(task.done() for task in self._tasks)

    async def _play(self, request: GenerationRequest, generation: Generation) -> None:
        lines = [(choice, self._line(request, choice)) for choice in generation.choices]
        for choice, _ in lines:
            choice.admit(self.cached_tokens)
            _score(choice)
        while lines:
            await self.flow.wait()
            lines = [(choice, line) for choice, line in lines if not choice.ended and next(line)]
            await asyncio.sleep(0)
            while self.paced and any(choice.in_mailbox for choice in generation.choices):
                await asyncio.sleep(0)

    def _line(self, request: GenerationRequest, choice: Choice) -> Iterator[bool]:
        """Feeds a choice one token at each turn; false after its last."""
        sampling = request.sampling
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.eos_ids))
        script = self.script(request, choice.index)
        for number, step in enumerate(script):
            if number == sampling.max_tokens:
                break
            if isinstance(step, GatewayError):
                choice.fail(step)
                yield False
            choice.push(number, u32([cast(int, step)]), _rows(request, cast(int, step)))
            if step in stop_ids:
                choice.finish(FinishReason.STOP, cast(int, step))
                yield False
            yield True
        choice.finish(FinishReason.LENGTH, None)
        yield False


class _Leaving:
    """What a choice that ends early tells."""

    def __init__(self, dispatcher: StubDispatcher, choice: Choice) -> None:
        self._dispatcher = dispatcher
        self._choice = choice

    def leave(self, reason: AbortReason) -> None:
        self._dispatcher.left.append((self._choice.index, reason))


class SendWriter:
    """A Writer over a server's `send`: paused until that has taken what was written."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending: asyncio.Task[None] | None = None
        self._pieces: list[bytes] = []

    @property
    def write_paused(self) -> bool:
        return self._sending is not None

    def write_body(self, piece: bytes, before: bytes = b"", after: bytes = b"") -> None:
        self._pieces.append(before + piece + after)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def drain(self) -> None:
        while self._sending is not None:
            await asyncio.wait({self._sending})

    async def _send_all(self) -> None:
        while self._pieces:
            await self._send({"type": "http.response.body", "body": self._pieces.pop(0), "more_body": True})
        self._sending = None


class OfferClient:
    """Offers the client of each request, as the gateway's own server does. It leaves when `receive` says so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, watching = Client(SendWriter(send)), set[asyncio.Task[None]]()
        scope["extensions"] = client.extensions()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.left()

        async def receive_and_watch() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                watching.add(asyncio.create_task(watch()))
            return message

        try:
            await self._app(scope, receive_and_watch, send)
        finally:
            for task in watching:
                task.cancel()


class StubGateway:
    """The whole application, but for the engines."""

    def __init__(self, files: dict[str, str], script: Script = lambda _request, _index: (), **changes: object) -> None:
        """`changes` are fields of what the engine serves that differ from the usual."""
        blob = bundle.pack(files)
        self.text = ModelText.from_files(files)
        self.serving = replace(_serving(bundle.sha256(blob)), **changes)  # type: ignore[arg-type]
        self.router = StubRouter(blob, self.serving)
        self.dispatcher = StubDispatcher(script, self.serving.eos_ids)
        self.allow_unknown_fields = False
        self.access = Access()

    def app(self) -> Starlette:
        """A new application each time, with measures of its own."""
        router = cast(Router, self.router)
        registry = CollectorRegistry()
        service = Service(
            router=router,
            dispatcher=cast(Dispatcher, self.dispatcher),
            texts=Texts(router),
            measures=Measures(metrics.build(metrics.Owner.GATEWAY, registry)),
            allow_unknown_fields=self.allow_unknown_fields,
        )
        app = create_app(service, registry, self.access)
        app.add_middleware(OfferClient)
        return app

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        app = self.app()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            yield client

    def sampled(self, text: str) -> list[int]:
        """The ids of a text that an engine says, no special tokens added."""
        return list(self.text.tokenizer._encode(text, False, CONTEXT_LENGTH))


def _serving(sha256: str) -> Serving:
    return Serving(
        model="tiny",
        version="1",
        digest="d" * 64,
        numerics="0123456789abcdef" * 4,
        bundle=sha256,
        vocab_size=512,
        context_length=CONTEXT_LENGTH,
        block_size=16,
        num_blocks=128,
        max_num_seqs=8,
        eos_ids=(),
        generation_defaults={},
        grant_requests=8,
        grant_tokens=4096,
        max_logprobs=20,
        hang_timeout_ms=10_000,
    )


def _score(choice: Choice) -> None:
    """In slices of 3: the token at position i has -i/8, alternatives as in `_rows`."""
    if choice.prompt_logprobs is None:
        return
    k, ids = choice.prompt_logprobs.k, choice.prompt_ids
    for first in range(1, len(ids), 3):
        part = range(first, min(first + 3, len(ids)))
        top_ids = u32([ids[i] + 1 + j for i in part for j in range(k)])
        own, tops = f32([-i / 8 for i in part]), f32([-1.0 - j for _ in part for j in range(k)])
        choice.push_prompt(first, Logprobs(k, own, u32([1] * len(part)), top_ids, tops))


def _rows(request: GenerationRequest, token: int) -> Logprobs | None:
    """Alternatives are the ids that follow the token's own, at -1, -2, ..., itself at -0.5 not among them."""
    k = request.sampling.logprobs
    if k is None:
        return None
    top_ids = array("I", [token + i + 1 for i in range(k)])
    return Logprobs(k, f32([-0.5]), u32([1]), top_ids, f32([-1.0 - i for i in range(k)]))
