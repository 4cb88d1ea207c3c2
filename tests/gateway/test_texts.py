from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest

from gateway.errors import Unavailable
from gateway.router import Router
from gateway.schemas import ChatRequest
from gateway.texts import ModelText, Texts
from protocol import bundle
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway, StubRouter


def texts_of(router: StubRouter) -> Texts:
    return Texts(cast(Router, router))


async def test_a_bundle_is_loaded_once_for_all_who_wait() -> None:
    gateway = StubGateway(vocabularies.characters())
    texts = texts_of(gateway.router)
    first, second = await asyncio.gather(texts.get(gateway.serving), texts.get(gateway.serving))
    assert first is second is await texts.get(gateway.serving)
    assert gateway.router.num_fetches == 1
    await texts.close()


async def test_who_gives_up_waiting_does_not_end_the_load() -> None:
    gateway = StubGateway(vocabularies.characters())
    texts = texts_of(gateway.router)
    impatient = asyncio.create_task(texts.get(gateway.serving))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await texts.get(gateway.serving) is not None
    assert gateway.router.num_fetches == 1
    await texts.close()


async def test_a_load_that_failed_is_tried_again() -> None:
    gateway = StubGateway(vocabularies.characters())
    texts = texts_of(gateway.router)
    fetch = gateway.router.fetch_bundle

    async def fail(_sha256: str) -> bytes:
        raise Unavailable("not now")

    gateway.router.fetch_bundle = fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="not now"):
        await texts.get(gateway.serving)
    gateway.router.fetch_bundle = fetch  # type: ignore[method-assign]
    assert await texts.get(gateway.serving) is not None
    await texts.close()


async def test_unfit_files_make_the_model_unavailable() -> None:
    blob = bundle.pack({"tokenizer.json": "{}"})
    serving = replace(StubGateway(vocabularies.characters()).serving, bundle=bundle.sha256(blob))
    texts = texts_of(StubRouter(blob, serving))
    with pytest.raises(Unavailable, match=r"tokenizer files are unfit: tokenizer\.json cannot be read"):
        await texts.get(serving)
    await texts.close()


async def test_bundles_of_models_that_are_gone_are_dropped() -> None:
    gateway = StubGateway(vocabularies.characters())
    texts = texts_of(gateway.router)
    old = await texts.get(gateway.serving)
    blob = bundle.pack(vocabularies.byte_level())
    newer = StubRouter(blob, replace(gateway.serving, bundle=bundle.sha256(blob)))
    gateway.router.served, gateway.router.blob = newer.served, blob
    assert await texts.get(newer.models()[0]) is not old
    assert list(texts._loads) == [bundle.sha256(blob)]
    await texts.close()


@pytest.mark.parametrize(
    "field", [{"messages": [{"role": "user", "content": ""}] * 3000}, {"chat_template_kwargs": {"a": [0] * 60_000}}]
)
async def test_a_large_body_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch, field: dict[str, object]) -> None:
    """Whatever makes it large: 55,000 empty messages held everybody up for half a second."""
    render, threads = ModelText._render, []

    def watched(text: ModelText, request: ChatRequest) -> str:
        threads.append(threading.current_thread())
        return render(text, request)

    monkeypatch.setattr(ModelText, "_render", watched)
    small = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    gateway = StubGateway(vocabularies.characters())
    async with gateway.client() as client:
        for body in (small, small | field):
            assert (await client.post("/v1/chat/completions", json=body)).status_code in (200, 400)
    assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_without_a_renderer_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than to say that it listens and to answer nothing."""

    def missing() -> None:
        raise ImportError("no renderer")

    router = cast(Router, StubGateway(vocabularies.characters()).router)
    monkeypatch.setattr("gateway.templates.renderer", missing)
    crashed = asyncio.Event()
    texts = Texts(router, on_crash=crashed.set)
    texts.start()
    async with asyncio.timeout(5):
        await crashed.wait()
    assert "task_crashed" in caplog.text
    await texts.close()


async def test_what_has_been_loaded_is_told() -> None:
    gateway = StubGateway(vocabularies.characters())
    told: list[str] = []
    texts = Texts(cast(Router, gateway.router), on_loaded=lambda: told.append(threading.current_thread().name))
    texts.start()
    await texts.get(gateway.serving)
    async with asyncio.timeout(5):
        while len(told) < 2:
            await asyncio.sleep(0.001)
    assert set(told) == {threading.current_thread().name}
    await texts.close()
