"""Answers in OpenAI's shapes: the events of a stream, and the whole of an unstreamed one.

A stream's events differ in one or two places, so everything around those is bytes made once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from gateway.generation import Generation
from gateway.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs, joined
from gateway.schemas import Options
from gateway.stream import Delta
from gateway.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Where one route's bodies differ from the other's."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    before_text: bytes  # opens the text of a chunk's choice
    after_text: bytes
    no_text: bytes  # in a finish chunk


CHAT = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
COMPLETION = Shape("cmpl-", "text_completion", "text_completion", b'"text":', b"", b'"text":""')


class Reply:
    """The answer to one request. `ChatReply` and `CompletionReply` are the two routes'."""

    def __init__(
        self,
        shape: Shape,
        options: Options,
        generation: Generation,
        model: str,
        numerics: str,
        tokenizer: Tokenizer,
        num_prompts: int,
    ) -> None:
        """The choices of a prompt share its tokens in the usage."""
        self._shape = shape
        self._options = options
        self._generation = generation
        self._num_prompts = num_prompts
        self._stop_strings = stop_strings(options, tokenizer)
        self._head = {
            "id": shape.id_prefix + secrets.token_hex(16),
            "object": shape.chunk_object if options.stream else shape.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{numerics[:12]}",
        }
        opening = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._before_choice = [opening + b'{"index":%d,' % index for index in range(len(generation.choices))]
        self._before_text = [before + shape.before_text for before in self._before_choice]
        self._no_choice = opening
        self._no_usage = b',"usage":null' if options.include_usage else b""
        #: The end of most chunks.
        self._plain_end = shape.after_text + b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"
        #: vLLM's list for a prompt, None where nobody asked.
        k = options.prompt_logprobs
        self._prompt_format = None if k is None else PromptLogprobs(tokenizer, k)
        #: Whether an event may be long: the first of a choice then has the logprobs of its prompt.
        self.echoes_logprobs = options.echoes_logprobs
        #: Tokens are told even where they have no text.
        self._shows_ids = options.logprobs is not None or options.return_token_ids
        #: Whether more than its text differs from chunk to chunk.
        self._is_rich = self._shows_ids or options.continuous_usage
        self._begun = [False] * len(generation.choices)
        #: By choice, once it has begun: the bytes around the text of an event that has no more than text to tell.
        self.text_frames: list[tuple[bytes, bytes] | None] = [None] * len(generation.choices)
        self._num_generated = [0] * len(generation.choices)

    def num_entries(self, delta: Delta) -> int:
        """Logprobs that `events` or `whole` will write for a delta."""
        rows = delta.logprobs
        num_entries = 0 if rows is None else len(delta.ids) * (1 + rows.k)
        if (width := self._options.prompt_width) is not None and not self._begun[delta.index]:
            num_entries += len(self._generation.choices[delta.index].prompt_ids) * (1 + width)
        return num_entries

    # --- a stream --------------------------------------------------------------------------------

    def events(self, delta: Delta) -> bytes:
        """The events of a delta: maybe none, when all its text is held back."""
        events, index, text = b"", delta.index, delta.text
        self._num_generated[index] = delta.num_generated
        if not self._begun[index]:
            self._begun[index] = True
            events = self._first_event(index)
            if not self._is_rich:
                self.text_frames[index] = self._before_text[index], self._plain_end
        if self._is_rich:
            if text or (delta.ids and self._shows_ids):
                events += self._rich_event(delta)
        elif text:
            events += self._before_text[index] + orjson.dumps(text) + self._plain_end
        if delta.finish_reason is not None:
            events += self._finish_event(delta)
        return events

    def last_events(self) -> bytes:
        """What follows the last delta."""
        if not self._options.include_usage:
            return DONE
        return self._no_choice + b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n" + DONE

    def _first_event(self, index: int) -> bytes:
        raise NotImplementedError

    def _rich_event(self, delta: Delta) -> bytes:
        logprobs = orjson.dumps(self._logprobs(delta))
        event = self._before_text[delta.index] + orjson.dumps(delta.text) + self._shape.after_text
        event += b',"logprobs":' + logprobs + b',"finish_reason":null'
        if self._options.return_token_ids:
            event += b',"token_ids":' + orjson.dumps(delta.ids.tolist())
        return event + b"}]" + self._chunk_usage() + b"}\n\n"

    def _finish_event(self, delta: Delta) -> bytes:
        event = self._before_choice[delta.index] + self._shape.no_text
        event += b',"logprobs":null,"finish_reason":"%s"' % _finish_reason(delta).encode()
        event += b',"stop_reason":' + orjson.dumps(self._stop_reason(delta))
        return event + b"}]" + self._chunk_usage() + b"}\n\n"

    def _chunk_usage(self) -> bytes:
        if self._options.continuous_usage:
            return b',"usage":' + orjson.dumps(self.usage())
        return self._no_usage

    # --- the whole -------------------------------------------------------------------------------

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The body of an unstreamed answer, from the one delta of each choice."""
        for delta in deltas:
            self._num_generated[delta.index] = delta.num_generated
        # Written one by one: as objects, the logprobs of all choices take ten times the memory of their JSON.
        ordered = sorted(deltas, key=lambda delta: delta.index)
        choices = [orjson.Fragment(orjson.dumps(self._choice(delta))) for delta in ordered]
        return orjson.dumps({**self._head, "choices": choices, "usage": self.usage(), **self._beside_choices()})

    def _beside_choices(self) -> dict[str, object]:
        """What else the body of an unstreamed answer has."""
        return {}

    def _choice(self, delta: Delta) -> dict[str, object]:
        choice = {
            "index": delta.index,
            **self._content(delta),
            "logprobs": self._logprobs(delta),
            "finish_reason": _finish_reason(delta),
            "stop_reason": self._stop_reason(delta),
        }
        if self._options.return_token_ids:
            choice["token_ids"] = delta.ids.tolist()
            choice["prompt_token_ids"] = self._generation.choices[delta.index].prompt_ids.tolist()
        return choice

    def _content(self, delta: Delta) -> dict[str, object]:
        raise NotImplementedError

    # --- both ------------------------------------------------------------------------------------

    def usage(self) -> dict[str, object]:
        """Prompts count once each, however many choices they have; of answers what was delivered so far."""
        choices = self._generation.choices
        leaders = choices[:: len(choices) // self._num_prompts]
        num_prompt = sum(len(choice.prompt_ids) for choice in leaders)
        num_generated = sum(self._num_generated)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in leaders)},
        }

    def _stop_reason(self, delta: Delta) -> str | int | None:
        reason = delta.stop_reason
        return self._stop_strings.get(reason, reason) if isinstance(reason, int) else reason

    def _logprobs(self, delta: Delta) -> Mapping[str, object] | None:
        raise NotImplementedError


class ChatReply(Reply):
    """A chat completion: messages, the first chunk of each choice with its role."""

    def __init__(
        self, options: Options, generation: Generation, model: str, numerics: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(CHAT, options, generation, model, numerics, tokenizer, 1)
        self._format = ChatLogprobs(tokenizer)

    def _first_event(self, index: int) -> bytes:
        event = self._before_choice[index] + b'"delta":{"role":"assistant","content":""},"logprobs":null'
        event += b',"finish_reason":null'
        if self._options.return_token_ids:
            event += b',"prompt_token_ids":' + orjson.dumps(self._generation.choices[index].prompt_ids.tolist())
        return event + b"}]" + self._chunk_usage() + b"}\n\n"

    def _content(self, delta: Delta) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": delta.text, "refusal": None}}

    def _beside_choices(self) -> dict[str, object]:
        if self._prompt_format is None:
            return {}
        return {"prompt_logprobs": self._prompt_format.of(self._generation.choices[0])}

    def _logprobs(self, delta: Delta) -> Mapping[str, object] | None:
        return None if delta.logprobs is None else self._format.of(delta)


class CompletionReply(Reply):
    """A text completion; under echo each choice's text begins with its prompt's."""

    def __init__(
        self,
        options: Options,
        generation: Generation,
        model: str,
        numerics: str,
        tokenizer: Tokenizer,
        echoes: Sequence[str],
    ) -> None:
        """`echoes` holds, for each prompt, the text before its choices' own: empty without echo."""
        super().__init__(COMPLETION, options, generation, model, numerics, tokenizer, len(echoes))
        echoes = [echo for echo in echoes for _ in range(options.n)]
        self._echoes = echoes
        self._formats = [
            CompletionLogprobs(tokenizer, len(echo), skip_special_tokens=options.skip_special_tokens) for echo in echoes
        ]

    def _first_event(self, index: int) -> bytes:
        echo = self._echoes[index]
        if not echo and not self._options.return_token_ids and not self.echoes_logprobs:
            return b""
        logprobs = orjson.dumps(self._prompt_lists(index)) if self.echoes_logprobs else b"null"
        event = self._before_text[index] + orjson.dumps(echo) + b',"logprobs":' + logprobs + b',"finish_reason":null'
        if self._options.return_token_ids:
            event += b',"prompt_token_ids":' + orjson.dumps(self._generation.choices[index].prompt_ids.tolist())
        return event + b"}]" + self._chunk_usage() + b"}\n\n"

    def _content(self, delta: Delta) -> dict[str, object]:
        content: dict[str, object] = {"text": self._echoes[delta.index] + delta.text}
        if self._prompt_format is not None:
            content["prompt_logprobs"] = self._prompt_format.of(self._generation.choices[delta.index])
        return content

    def _logprobs(self, delta: Delta) -> Mapping[str, object] | None:
        if delta.logprobs is None:
            return None
        lists = self._formats[delta.index].of(delta)
        if self.echoes_logprobs and not self._options.stream:
            return joined([self._prompt_lists(delta.index), lists])
        return lists

    def _prompt_lists(self, index: int) -> dict[str, list[object]]:
        """What echo has of the prompt."""
        k = self._options.logprobs
        assert k is not None
        return self._formats[index].of_prompt(self._echoes[index], self._generation.choices[index], k)


def stop_strings(options: Options, tokenizer: Tokenizer) -> dict[int, str]:
    """Stop strings that went to the engine as ids: they come back as strings."""
    own_ids = options.sampling.get("stop_token_ids") or ()
    assert isinstance(own_ids, tuple)
    return {
        token: stop
        for stop in options.stop
        if (token := tokenizer.special_id(stop)) is not None and token not in own_ids
    }


def _finish_reason(delta: Delta) -> str:
    assert delta.finish_reason is not None
    return delta.finish_reason.value
