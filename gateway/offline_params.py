"""`SamplingParams` as a user of the Python interface writes them: vLLM's names, defaults and meanings.

They become the body of a request, so that they are checked, and mean, what they do over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.arguments import names_nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt's answers are sampled.

    `n` answers are made. `temperature` 0 is greedy; `top_k` 0 and -1 mean no limit. `seed` None
    takes the next one of the LLM's own. `max_tokens` None is what the context leaves. `stop` strings
    and `stop_token_ids` end an answer and, without `include_stop_str_in_output`, are not part of it.
    `logprobs` and `prompt_logprobs` are how many most likely tokens come with each token's own.

    Values are checked by `LLM.generate`, which raises ValueError naming the field and its range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def completion_body(self) -> dict[str, object]:
        """The fields of a request to /v1/completions that say the same."""
        body: dict[str, object] = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if name in body and not isinstance(value := body[name], str):
                body[name] = _list(value)
        if isinstance(bias := self.logit_bias, Mapping):
            body["logit_bias"] = {str(token): value for token, value in bias.items()}
        return body

    def chat_body(self) -> dict[str, object]:
        """The same for /v1/chat/completions."""
        body = self.completion_body()
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return body


# A generated __init__ cannot be decorated where it stands.
SamplingParams.__init__ = names_nearest(SamplingParams.__init__)  # type: ignore[method-assign]


def _list(value: object) -> object:
    """Any sequence of a caller's as JSON has it; what is none goes on to be refused by name."""
    return list(value) if isinstance(value, Sequence) else value
