"""The Python interface: `LLM` generates without a server, on the same path but for HTTP.

    from sluicegate import LLM, SamplingParams

    with LLM("models/SmolLM2-135M-Instruct") as llm:
        for output in llm.generate(["The sky is", "Water is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

An engine process of its own is started, and answers are those of a server for the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from gateway.arguments import names_nearest
from gateway.errors import BadRequest
from gateway.offline_engine import EngineError, OfflineEngine
from gateway.offline_outputs import RequestOutput, completion_output, prompt_logprobs
from gateway.offline_params import SamplingParams
from gateway.preparation import Call, prepare_chat, prepare_completion
from gateway.replies import stop_strings
from gateway.schemas import ChatRequest, CompletionRequest, parse_chat, parse_completion
from gateway.stream import Delta
from gateway.texts import ModelText
from gateway.tokenizer import PromptTooLong
from protocol.config import default_cache_dir
from protocol.messages import U32, Logprobs, Serving
from protocol.progress import ProgressBar
from protocol.sampling import choice_seed, shown

__all__ = ["LLM", "EngineError", "RequestOutput", "SamplingParams"]

#: A prompt: text, {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Mapping[str, Any]

#: Messages of one conversation, as in a request to /v1/chat/completions.
Conversation = Sequence[Mapping[str, Any]]


_Request = TypeVar("_Request", CompletionRequest, ChatRequest)

#: What vLLM generates when nothing is said, by chat too.
_MAX_TOKENS = 16

#: Whoever closes an LLM waits for nothing.
_ALWAYS = ("--drain-timeout=0",)


#: What to do about an option of vLLM's that there is no support for.
_REMEDIES = {
    "tokenizer": "the model's own is used; put other files into its folder",
    "trust_remote_code": "code that a model brings is never run; leave it out",
}


@dataclass(frozen=True, slots=True)
class _Ask:
    """A prompt that was checked as far as that goes without the model. `at` is its place, for errors."""

    number: int
    at: str
    request: CompletionRequest | ChatRequest
    fills_context: bool = False


@dataclass(frozen=True, slots=True)
class _Answered:
    """What came of it, not yet made into objects: `deltas` has one for each answer."""

    prompt: str | None
    prompt_ids: array[int]
    listed_ids: list[int]
    deltas: list[Delta]
    prompt_logprobs: Logprobs | None
    cached_tokens: int


class LLM:
    """A model on this machine. Close it, or leave its `with` block, to end the engine process.

    `model` and the options are those of `sluicegate engine` by the same names; None is the engine's
    default, and `config` a TOML file with others. `seed` is for prompts whose parameters have none: their
    seeds follow from it and from their number, None makes them random.
    """

    @names_nearest
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        revision: str | None = None,
        seed: int | None = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | str | None = None,
        enable_prefix_caching: bool | None = None,
        block_size: int | None = None,
        reproducible: bool | None = None,
        backend: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        load_format: str = "auto",
        profile_dir: str | os.PathLike[str] | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        log_level: str = "warning",
        use_tqdm_on_load: bool = True,
    ) -> None:
        """Returns once the model is loaded; ValueError for what cannot be had, EngineError for an engine that fails."""
        _refuse("tokenizer", tokenizer, (None, model))
        _refuse("trust_remote_code", trust_remote_code, (False,))
        flags = _flags(
            model=os.fspath(model),
            revision=revision,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            block_size=block_size,
            reproducible=reproducible,
            backend=backend,
            device=device,
            threads=threads,
            load_format=load_format,
            profile_dir=profile_dir,
            cache_dir=cache_dir,
            config=config,
            log_level=log_level,
        )
        self._seed, self._numbers, folder = seed, count(), Path(cache_dir or default_cache_dir())
        self._engine = OfflineEngine(flags, folder, ProgressBar(wanted=use_tqdm_on_load))
        self._finalizer = weakref.finalize(self, self._engine.close)  # also when it is forgotten, or Python ends

    def close(self) -> None:
        """End the engine process. What still generates in another thread raises EngineError."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @names_nearest
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to each prompt, in the order of the prompts.

        `sampling_params` are for all prompts, or one each; None takes what the model recommends.
        Raises TypeError or ValueError for what cannot be generated, EngineError when the engine fails.
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        asks = []
        for place, (prompt, params) in enumerate(zip(given, _one_each(sampling_params, len(given)), strict=True)):
            at = f"prompts[{place}]"
            body = {} if params is None else params.completion_body()
            fills_context = params is not None and params.max_tokens is None
            asks.append(self._ask(parse_completion, body | {"prompt": _prompt(prompt, at)}, at, fills_context))
        return self._run(asks, use_tqdm)

    @names_nearest
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to each of several, by the model's chat template.

        Raises as `generate` does.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        extra: dict[str, object] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        if tools:  # for the template; calls are not parsed
            extra |= {"tools": [dict(tool) for tool in tools], "tool_choice": "none"}
        asks = []
        all_params = _one_each(sampling_params, len(conversations))
        for place, (conversation, params) in enumerate(zip(conversations, all_params, strict=True)):
            body = {"max_tokens": _MAX_TOKENS} if params is None else params.chat_body()
            asks.append(self._ask(parse_chat, body | extra | {"messages": list(conversation)}, f"messages[{place}]"))
        return self._run(asks, use_tqdm)

    def _ask(
        self, parse: Callable[..., _Request], body: dict[str, object], at: str, fills_context: bool = False
    ) -> _Ask:
        """Number a request and check its body. Raises ValueError."""
        number = next(self._numbers)
        if "seed" not in body and self._seed is not None:
            body["seed"] = choice_seed(self._seed, number)
        try:
            return _Ask(number, at, parse(body, allow_unknown=False), fills_context)
        except BadRequest as error:
            raise ValueError(f"{at}: {error}") from None

    def _run(self, asks: list[_Ask], use_tqdm: bool) -> list[RequestOutput]:
        with _progress(len(asks), use_tqdm) as on_answer:
            text, answered = self._engine.call(_answer_all(self._engine, asks, on_answer))
        # Made here and not on the loop, which has frames to read: a million logprobs take seconds.
        return [_output(ask, each, text) for ask, each in zip(asks, answered, strict=True)]


# --- on the engine's loop ------------------------------------------------------------------------


async def _answer_all(
    engine: OfflineEngine, asks: list[_Ask], on_answer: Callable[[], object]
) -> tuple[ModelText, list[_Answered]]:
    """As many at a time as the engine takes in, the longest first; the first that fails ends the others."""
    serving, text = await engine.served()
    answered: dict[int, _Answered] = {}
    left = iter(_longest_first(asks))

    async def work() -> None:
        for place, ask in left:
            answered[place] = await _answer(engine, ask, serving, text)
            on_answer()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(asks), serving.grant_requests) - 1):
                group.create_task(work())
            await work()  # one of them here: a prompt alone takes no task
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return text, [answered[place] for place in range(len(asks))]


def _longest_first(asks: Sequence[_Ask]) -> list[tuple[int, _Ask]]:
    """Asks and their places, those that may generate most first, equal ones as they came.

    Prompts enter a few in each step, beside what decodes already: so the last to enter have little left to do, and no
    step at the end has a handful of rows. Answers do not depend on it.
    """

    def most_tokens(item: tuple[int, _Ask]) -> float:
        request = item[1].request
        if request.options.max_tokens is not None:
            return request.options.max_tokens
        return math.inf if item[1].fills_context or isinstance(request, ChatRequest) else _MAX_TOKENS

    return sorted(enumerate(asks), key=most_tokens, reverse=True)


async def _answer(engine: OfflineEngine, ask: _Ask, serving: Serving, text: ModelText) -> _Answered:
    call, request = Call(f"llm-{ask.number}", ""), ask.request
    prompt: str | None
    try:
        if isinstance(request, ChatRequest):
            prompt = await text.render(request)
            prepared = await prepare_chat(request, serving, text, call)
        else:
            prompt = given if isinstance(given := request.prompts[0], str) else None
            if ask.fills_context:
                request = await _filling_context(request, serving, text)
            prepared = await prepare_completion(request, serving, text, call)
        generation = await engine.begin(prepared)
        listed_ids = prepared.prompts[0].tolist()  # now that the engine works
        return _Answered(prompt, prepared.prompts[0], listed_ids, *await engine.answers(generation))
    except BadRequest as error:
        raise ValueError(f"{ask.at}: {error}") from None


async def _filling_context(request: CompletionRequest, serving: Serving, text: ModelText) -> CompletionRequest:
    """`request` with the max_tokens that its prompt leaves; as it is where that is too long."""
    (prompt,) = request.prompts
    if isinstance(prompt, str):
        try:
            prompt = await text.tokenizer.encode(
                prompt, add_special_tokens=request.add_special_tokens, most=serving.context_length
            )
        except PromptTooLong:
            return request
    room = max(1, serving.context_length - len(prompt))
    return replace(request, prompts=(prompt,), options=replace(request.options, max_tokens=room))


# --- values --------------------------------------------------------------------------------------


def _output(ask: _Ask, answered: _Answered, text: ModelText) -> RequestOutput:
    options, prompt_ids = ask.request.options, answered.prompt_ids
    strings = stop_strings(options, text.tokenizer)
    return RequestOutput(
        request_id=str(ask.number),
        prompt=answered.prompt,
        prompt_token_ids=answered.listed_ids,
        prompt_logprobs=prompt_logprobs(prompt_ids, answered.prompt_logprobs, options.prompt_logprobs, text.tokenizer),
        outputs=[completion_output(delta, text.tokenizer, strings) for delta in answered.deltas],
        finished=True,
        num_cached_tokens=answered.cached_tokens,
    )


def _prompt(prompt: object, at: str) -> object:
    """A prompt as a request's body has it. Raises TypeError."""
    text = prompt
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        text = prompt.get("prompt")
        if isinstance(ids := prompt.get("prompt_token_ids"), Iterable):
            with contextlib.suppress(TypeError):
                return _column(ids)
    if isinstance(text, str):
        return text
    raise TypeError(f"{at} must be a string, {{'prompt': text}} or {{'prompt_token_ids': [...]}}, got {shown(prompt)}.")


def _column(ids: Iterable[Any]) -> object:
    """Token ids as one column; as they are where the checks of a body will refuse them. Raises TypeError."""
    if not isinstance(ids, list):
        # Arrays and tensors make a list at once; gone through, each item is an object of theirs.
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    column = array(U32)
    try:
        column.fromlist(ids)  # three quarters of the time of `array(U32, ids)`
    except OverflowError:
        return ids
    return column or ids


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Iterator[SamplingParams | None]:
    """The parameters of each prompt. Raises ValueError when there are more or fewer than prompts."""
    if params is None or isinstance(params, SamplingParams):
        return iter([params] * num_prompts)
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params must be one, or one for each of {num_prompts} prompts; got {len(params)}.")
    return iter(params)


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[], object]]:
    """A bar; what to call at each answer."""
    if not wanted:
        yield lambda: None
        return
    with tqdm(total=total, desc="Prompts", disable=None) as bar:  # None: not where stderr is no terminal
        yield bar.update


def _refuse(name: str, value: object, harmless: tuple[object, ...]) -> None:
    if value not in harmless:
        raise ValueError(f"{name}={value!r} cannot be had: {_REMEDIES[name]}.")


def _flags(**options: object) -> list[str]:
    """Options as words of the engine's command line, without those that are None; and what is always said."""
    words = list(_ALWAYS)
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words
