"""POST /v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import answer
from gateway.bodies import parsed
from gateway.generation import Generation
from gateway.preparation import prepare_chat
from gateway.replies import ChatReply, Reply
from gateway.schemas import parse_chat
from gateway.service import call, service


async def create_chat_completion(request: Request) -> Response:
    shared = service(request)
    chat = await parsed(request, parse_chat)
    serving = await shared.serving(request, chat.options.model)
    text = await shared.texts.get(serving)
    prepared = await prepare_chat(chat, serving, text, await call(request))

    def reply(generation: Generation) -> Reply:
        return ChatReply(chat.options, generation, prepared.model, serving.numerics, text.tokenizer)

    return await answer(request, prepared, reply)
