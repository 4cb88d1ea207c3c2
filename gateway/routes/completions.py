"""POST /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import answer
from gateway.bodies import parsed
from gateway.generation import Generation
from gateway.preparation import echoes, prepare_completion
from gateway.replies import CompletionReply, Reply
from gateway.schemas import parse_completion
from gateway.service import call, service


async def create_completion(request: Request) -> Response:
    shared = service(request)
    completion = await parsed(request, parse_completion)
    serving = await shared.serving(request, completion.options.model)
    text = await shared.texts.get(serving)
    prepared = await prepare_completion(completion, serving, text, await call(request))
    before = await echoes(completion, prepared.prompts, text)

    def reply(generation: Generation) -> Reply:
        return CompletionReply(completion.options, generation, prepared.model, serving.numerics, text.tokenizer, before)

    return await answer(request, prepared, reply)
