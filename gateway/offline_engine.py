"""An engine process of our own, and the gateway's parts joined to it, on an event loop in a thread.

The thread is what lets `LLM` be used where an event loop runs already. The engine is kept running
as under `sluicegate serve`: one that dies is started again, and what it worked on goes on there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from gateway.errors import BadRequest, GatewayError, Overloaded, Unavailable
from gateway.generation import Generation
from gateway.resume import Dispatcher, DispatchSettings
from gateway.router import Router, RouterSettings
from gateway.stream import Delta, GenerationRequest
from gateway.texts import ModelText, Texts
from protocol.config import child_environ
from protocol.folders import private_folder
from protocol.messages import Logprobs, Serving
from protocol.metrics import Instruments, Owner
from protocol.progress import ProgressBar
from protocol.supervisor import ChildFailed, Program, Supervisor

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Between tries to start a request while an engine comes back.
_RETRY_S = 0.1

_CLOSED = "this LLM is closed"


class EngineError(RuntimeError):
    """The engine does not start, was closed, or gave up on a request."""


class OfflineEngine:
    """One engine process from `__init__` to `close`. Its coroutines run on its own loop, by `call`."""

    def __init__(self, flags: Sequence[str], cache_dir: Path, bar: ProgressBar) -> None:
        """Returns once the engine serves. `flags` are `sluicegate engine`'s; `bar` shows how far its start is.

        Raises EngineError.
        """
        self._bar = bar
        self._flags = tuple(flags)
        self._cache_dir = cache_dir
        self._pid = os.getpid()
        self._failure: str | None = None
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        # A daemon, since the interpreter waits for others before it calls what is to end this one.
        self._thread = threading.Thread(target=self._run, name="sluicegate-llm", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine on the engine's loop; interrupted, it is cancelled there.

        Raises what it raises, and EngineError when the engine is gone.
        """
        if self._failure is not None:
            work.close()
            raise EngineError(self._failure)
        # A queue in C: `run_coroutine_threadsafe`, its two futures and their callbacks take 0.15 ms more.
        ended: SimpleQueue[asyncio.Task[_T]] = SimpleQueue()
        begun: list[asyncio.Task[_T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(work))
            begun[0].add_done_callback(ended.put)

        self._loop.call_soon_threadsafe(begin)
        try:
            task = ended.get()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(lambda: begun[0].cancel())
            raise
        try:
            return task.result()
        except asyncio.CancelledError:
            raise EngineError(self._reason) from None

    def close(self) -> None:
        """End the engine; it is gone on return. Harmless when it has ended."""
        if os.getpid() != self._pid:
            return  # a copy of us, made by fork: the engine is not its own
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._fail, _CLOSED)
        self._thread.join()

    @property
    def _reason(self) -> str:
        return self._failure or _CLOSED

    # --- on the loop -----------------------------------------------------------------------------

    async def serving(self) -> Serving:
        """What the engine serves, as soon as it does. Raises EngineError when it never will again."""
        while self._failure is None:
            if served := self._router.models():
                return served[0]
            self._changed.clear()
            await self._changed.wait()
        raise EngineError(self._failure)

    async def served(self) -> tuple[Serving, ModelText]:
        """What the engine serves, with the model's tokenizer and chat template. Raises as `serving`, and Unavailable
        when these are unfit.
        """
        while True:
            serving = await self.serving()
            try:
                return serving, await self._texts.get(serving)
            except Unavailable:
                if self._router.models():
                    raise
                # It went away before it had sent them.

    async def begin(self, request: GenerationRequest) -> Generation:
        """Give an unstreamed request to the engine, as soon as there is one. Raises EngineError."""
        while True:
            try:
                return await self._dispatcher.start(request)
            except (Unavailable, Overloaded):  # it went away in this moment
                await self.serving()
                await asyncio.sleep(_RETRY_S)

    async def answers(self, generation: Generation) -> tuple[list[Delta], Logprobs | None, int]:
        """The one delta of each choice, by index, the prompt's logprobs, and how many of its tokens the engine had
        in its cache.

        Raises BadRequest, and EngineError when the engine gave it up.
        """
        try:
            deltas = sorted([delta async for delta in generation], key=lambda delta: delta.index)
            first = generation.choices[0]
            return deltas, first.prompt_logprobs, first.cached_tokens
        except BadRequest:
            raise
        except GatewayError as error:
            raise EngineError(self._failure or str(error)) from error
        finally:
            generation.abort()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._runner as runner:
                runner.run(self._serve())
        except Exception as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            log.critical("llm_crashed", exc_info=error)
        finally:
            if not self._started.done():
                self._started.set_exception(EngineError(self._reason))

    async def _serve(self) -> None:
        """Keep the engine running until `_fail`."""
        with private_folder() as folder:
            address = f"ipc://{folder}/engine.sock"
            # `-P`: a folder called `engine` where the user happens to be is not ours.
            argv = (sys.executable, "-P", "-m", "sluicegate", "engine", *self._flags, f"--listen={address}")
            supervisor = Supervisor([[Program("engine", argv, child_environ({}))]], self._bar.show)
            self._connect(address)
            await self._router.start()
            self._texts.start()
            lives = asyncio.create_task(supervisor.run(self._announce), name="engine")
            lives.add_done_callback(self._lives_ended)
            await self._ended.wait()
            await self._dispatcher.close()
            await self._texts.close()
            await self._router.close()
            supervisor.stop()
            await asyncio.wait({lives})

    def _connect(self, address: str) -> None:
        """Make the gateway's parts."""

        def crashed() -> None:
            self._fail("the link to the engine failed by a fault of ours; the log has the reason")

        instruments = Instruments(Owner.GATEWAY, CollectorRegistry())
        self._router = Router(RouterSettings((address,), self._cache_dir), instruments, on_crash=crashed)
        # A request waits for as long as the engine may come back: nobody else has one.
        patient = DispatchSettings(credit_wait_s=math.inf, resume_timeout_s=math.inf)
        self._dispatcher = Dispatcher(self._router, patient, instruments, on_crash=crashed)
        self._texts = Texts(self._router)
        self._router.watch(self._changed.set)

    async def _announce(self) -> None:
        await self.served()
        self._bar.close()
        self._started.set_result(None)

    def _lives_ended(self, lives: asyncio.Task[None]) -> None:
        error = None if lives.cancelled() else lives.exception()
        if error is not None and not isinstance(error, ChildFailed):
            log.critical("supervisor_crashed", exc_info=error)
        self._fail(str(error) if error is not None else _CLOSED)

    def _fail(self, reason: str) -> None:
        """End everything; the first reason is the one that is told."""
        self._failure = self._failure or reason
        self._bar.close()
        self._changed.set()
        self._ended.set()
