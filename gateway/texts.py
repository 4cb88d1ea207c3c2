"""The text side of a model, tokenizer and chat template, loaded once for each bundle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway import templates
from gateway.errors import Unavailable
from gateway.router import Router, stop_process
from gateway.schemas import ChatRequest
from gateway.templates import ChatTemplate, Message
from gateway.tokenizer import Tokenizer
from protocol import bundle
from protocol.messages import Serving

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelText:
    """What turns a model's text into ids and back."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> ModelText:
        """From a bundle's files. Raises BundleError when they are unfit."""
        tokenizer = Tokenizer(files)
        return cls(tokenizer, ChatTemplate(files, tokenizer.config, tokenizer.special_tokens))

    async def render(self, request: ChatRequest, *, in_thread: bool = False) -> str:
        """The text of a chat's prompt. Raises BadRequest when the template refuses it."""
        return await asyncio.to_thread(self._render, request) if in_thread else self._render(request)

    def _render(self, request: ChatRequest) -> str:
        messages: Sequence[Message] = request.messages
        if not self.template.knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        return self.template.render(
            messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.template_variables,
        )


class Texts:
    """Loads bundles through the router, each once however many requests wait for it."""

    def __init__(
        self,
        router: Router,
        on_loaded: Callable[[], None] = lambda: None,
        *,
        on_crash: Callable[[], None] = stop_process,
    ) -> None:
        """`on_loaded` is called when something large has been loaded that stays."""
        self._router = router
        self._on_loaded = on_loaded
        self._on_crash = on_crash
        self._loads: dict[str, asyncio.Task[ModelText]] = {}
        self._warming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Load what every model needs while the engines load theirs."""
        self._warming = asyncio.create_task(self._warm(), name="import-renderer")
        self._warming.add_done_callback(self._warmed)

    def _warmed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("task_crashed", exc_info=error, extra={"task": task.get_name()})
            self._on_crash()

    async def _warm(self) -> None:
        await asyncio.to_thread(templates.renderer)
        self._on_loaded()

    async def get(self, serving: Serving) -> ModelText:
        """The text side of a served model. Raises Unavailable when its bundle is not to be had."""
        load = self._loads.get(serving.bundle)
        if load is not None and load.done() and not load.cancelled() and load.exception() is None:
            return load.result()
        if load is None or load.done():
            # The bundles of models that are gone would stay for ever.
            served = {model.bundle for model in self._router.models()}
            self._loads = {sha256: task for sha256, task in self._loads.items() if sha256 in served}
            load = asyncio.create_task(self._load(serving.bundle), name=f"load-bundle-{serving.bundle[:8]}")
            self._loads[serving.bundle] = load
        # A client that leaves must not end the load for the others.
        return await asyncio.shield(load)

    async def close(self) -> None:
        tasks = [*self._loads.values(), *([self._warming] if self._warming is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loads.clear()

    async def _load(self, sha256: str) -> ModelText:
        blob = await self._router.fetch_bundle(sha256)
        try:
            text = await asyncio.to_thread(lambda: ModelText.from_files(bundle.unpack(blob)))
        except bundle.BundleError as error:
            raise Unavailable(f"The model's tokenizer files are unfit: {error}") from error
        self._on_loaded()
        return text
