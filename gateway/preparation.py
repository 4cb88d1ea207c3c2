"""A typed request to a `GenerationRequest`: everything that depends on the model.

Renders and encodes prompts, fills in the model's generation defaults, resolves max_tokens
against the context, and checks ids and limits, so that an engine refuses nothing.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.detokenizer import Detokenizer
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.schemas import ChatRequest, CompletionRequest, Options
from gateway.slices import Slices
from gateway.stream import GenerationRequest, TextDecoder
from gateway.texts import ModelText
from gateway.tokenizer import PromptTooLong
from protocol.messages import Serving, u32
from protocol.sampling import MAX_BAD_WORD_IDS, SamplingError, SamplingParams, shown

#: What OpenAI's legacy route generates when nothing is said.
COMPLETION_MAX_TOKENS = 16

#: Logprobs of prompts in one answer: some 120 MB of JSON.
MAX_PROMPT_ENTRIES = 2**21

#: Ids of a prompt that are made text without a pause; each takes some microseconds.
_ECHO_IDS = 512

#: Fields of generation_config.json that hold where the request says nothing.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks: what of an HTTP call goes with its generation."""

    request_id: str
    traceparent: str
    is_large: bool = False  # a body over `INLINE_BYTES`: what takes longer with its size is done in a thread


async def prepare_chat(request: ChatRequest, serving: Serving, text: ModelText, call: Call) -> GenerationRequest:
    """Raises BadRequest (ContextLengthExceeded among others) naming the field and the limits."""
    rendered = await text.render(request, in_thread=call.is_large)
    try:
        prompt_ids = await text.tokenizer.encode(
            rendered, add_special_tokens=request.add_special_tokens, most=serving.context_length
        )
    except PromptTooLong as error:
        raise _context_exceeded(error, request.options, "messages", serving) from None
    return await _generation(request.options, (prompt_ids,), "messages", None, serving, text, call)


async def prepare_completion(
    request: CompletionRequest, serving: Serving, text: ModelText, call: Call
) -> GenerationRequest:
    """As `prepare_chat`, for each of the prompts."""
    prompts = []
    slices = Slices()
    try:
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompt = await text.tokenizer.encode(
                    prompt, add_special_tokens=request.add_special_tokens, most=serving.context_length
                )
            prompts.append(prompt)
            await slices.turn()
    except PromptTooLong as error:
        raise _context_exceeded(error, request.options, "prompt", serving) from None
    return await _generation(request.options, tuple(prompts), "prompt", COMPLETION_MAX_TOKENS, serving, text, call)


async def echoes(request: CompletionRequest, prompts: tuple[array[int], ...], text: ModelText) -> list[str]:
    """What stands before the answers to each prompt: under echo its text, else nothing.

    Of a prompt given as ids that ends inside a character, that character is left to the answer.
    """
    if not request.echo:
        return [""] * len(prompts)
    skip_special_tokens = request.options.skip_special_tokens
    slices = Slices()
    texts = []
    for given, prompt_ids in zip(request.prompts, prompts, strict=True):
        if isinstance(given, str):
            texts.append(given)
        else:
            detokenizer = Detokenizer(text.tokenizer, u32(), skip_special_tokens)
            pieces: list[str] = []
            for start in range(0, len(prompt_ids), _ECHO_IDS):
                pieces += map(detokenizer.push, prompt_ids[start : start + _ECHO_IDS])
                await slices.turn()
            texts.append("".join(pieces))
    return texts


async def _generation(
    options: Options,
    prompts: tuple[array[int], ...],
    field: str,
    default_max_tokens: int | None,
    serving: Serving,
    text: ModelText,
    call: Call,
) -> GenerationRequest:
    for prompt_ids in prompts:
        _check_prompt(prompt_ids, field, serving)
    max_tokens = _max_tokens(options, max(map(len, prompts)), default_max_tokens, field, serving)
    _check_scored(options, prompts)
    bad_words = await _bad_words(options, text)
    limits = options, max_tokens, bad_words, serving, text
    sampling = await asyncio.to_thread(_sampling, *limits) if call.is_large else _sampling(*limits)

    def decoder(prompt_ids: array[int]) -> TextDecoder:
        return Detokenizer(text.tokenizer, prompt_ids, options.skip_special_tokens)

    return GenerationRequest(
        request_id=call.request_id,
        model=serving.model,
        prompts=prompts,
        sampling=sampling,
        decoder=decoder,
        n=options.n,
        seed=options.seed,
        stop=options.stop,
        include_stop=options.include_stop,
        stream=options.stream,
        priority=options.priority,
        salt=options.cache_salt,
        traceparent=call.traceparent,
    )


def _check_prompt(prompt_ids: array[int], field: str, serving: Serving) -> None:
    if not prompt_ids:
        raise BadRequest(
            f"{field}: the prompt is empty and this model has no token to begin with; give some text.", field
        )
    # By numpy: `max` makes an object of each id, 25 ns a piece.
    if (highest := int(np.frombuffer(prompt_ids, np.uint32).max())) >= serving.vocab_size:
        raise BadRequest(f"{field}: token id {highest} is outside the vocabulary of {serving.vocab_size}.", field)


def _check_scored(options: Options, prompts: tuple[array[int], ...]) -> None:
    if (width := options.prompt_width) is None:
        return
    num_entries = sum(map(len, prompts)) * (1 + width) * options.n
    if num_entries > MAX_PROMPT_ENTRIES:
        name = "logprobs" if options.echoes_logprobs else "prompt_logprobs"
        raise BadRequest(
            f"{name}: prompt tokens times alternatives and one times n must be at most {MAX_PROMPT_ENTRIES}, "
            f"got {num_entries}; send fewer prompts at once.",
            name,
        )


async def _bad_words(options: Options, text: ModelText) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written inside a text and after a space, in ids."""
    sequences: dict[tuple[int, ...], None] = {}
    slices = Slices()
    for word in options.bad_words:
        bare = word.lstrip(" ")
        for form in filter(None, (bare, f" {bare}")):
            try:
                ids = await text.tokenizer.encode(form, add_special_tokens=False, most=MAX_BAD_WORD_IDS)
            except PromptTooLong as error:
                raise BadRequest(
                    f"bad_words: {shown(word)} has {error.num_tokens} tokens; at most {MAX_BAD_WORD_IDS} are taken.",
                    "bad_words",
                ) from None
            if ids:
                sequences[tuple(ids)] = None
        await slices.turn()
    return tuple(sequences)


def _max_tokens(options: Options, num_prompt: int, default: int | None, field: str, serving: Serving) -> int:
    """The limit of every choice; prompts of a list share it, so the longest decides."""
    context = serving.context_length
    room = context - num_prompt
    asked = options.max_tokens
    if asked is not None and asked <= room:
        return asked
    if asked is None and room > 0:
        return room if default is None else min(default, room)
    raise _context_exceeded(PromptTooLong(num_prompt, exact=True), options, field, serving)


def _context_exceeded(prompt: PromptTooLong, options: Options, field: str, serving: Serving) -> ContextLengthExceeded:
    """The error that says what does not fit, and what would."""
    context, num_prompt = serving.context_length, prompt.num_tokens
    name, asked = options.max_tokens_name, options.max_tokens
    text = f"This model's context length is {context} tokens; the prompt has "
    text += f"{'' if prompt.exact else 'at least '}{num_prompt} tokens"
    if asked is not None:
        text += f" and {name} is {asked}, together {num_prompt + asked}"
    if num_prompt < context:
        return ContextLengthExceeded(f"{text}. Lower {name} to at most {context - num_prompt}.", field)
    return ContextLengthExceeded(f"{text}. Shorten the prompt to at most {context - 1} tokens.", field)


def _sampling(
    options: Options, max_tokens: int, bad_words: tuple[tuple[int, ...], ...], serving: Serving, text: ModelText
) -> SamplingParams:
    defaults = {
        name: value
        for name in _DEFAULTED
        if isinstance(value := serving.generation_defaults.get(name), int | float) and not isinstance(value, bool)
    }
    # Any: `validate` checks the type of each.
    fields: dict[str, Any] = {**defaults, **options.sampling, "max_tokens": max_tokens, "logprobs": options.logprobs}
    fields |= {"prompt_logprobs": options.prompt_width, "bad_words": bad_words}
    # A stop string that is one special token is found by the engine, a step or two sooner.
    stop_ids = [token for stop in options.stop if (token := text.tokenizer.special_id(stop)) is not None]
    fields["stop_token_ids"] = tuple(dict.fromkeys([*fields.get("stop_token_ids", ()), *stop_ids]))
    sampling = SamplingParams(**fields)
    try:
        sampling.validate(serving.vocab_size)
    except SamplingError as error:
        name = options.max_tokens_name if error.field == "max_tokens" else error.field
        raise BadRequest(str(error), name) from None
    for name, asked in (("logprobs", options.logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if asked is not None and asked > serving.max_logprobs:
            raise BadRequest(f"At most {serving.max_logprobs} {name} a token are offered, got {asked}.", name)
    return sampling
