"""Chat templates: messages to the text a model was trained on.

A template is Jinja code from the model's folder. transformers renders it, in the sandbox and with
the functions that templates are written for; it sees plain data only, and whatever it raises is
the request's fault (400) with the template's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jinja2
import orjson

from gateway.errors import BadRequest

Message = dict[str, object]


def renderer() -> Callable[..., tuple[list[str], object]]:
    """transformers' `render_jinja_template`. Its import takes a second, so it waits until somebody needs it."""
    from transformers.utils import chat_template_utils

    render: Callable[..., tuple[list[str], object]] = chat_template_utils.render_jinja_template
    return render


class ChatTemplate:
    """A model's chat template. transformers compiles it when it is first used, and once."""

    def __init__(
        self, files: Mapping[str, str], config: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> None:
        """`files` are a bundle's, `config` its tokenizer_config.json. A bundle may have no template."""
        self._sources = _sources(files, config)
        self._special_tokens = dict(special_tokens)
        self._render = renderer()
        #: Templates that know no developer role get its messages as the system's.
        self.knows_developer = any("developer" in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt's text. Raises BadRequest with the template's own text, never empty."""
        source = self._sources.get("tool_use" if tools else "default") or self._sources.get("default")
        if source is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", "messages")
        try:
            (text,), _ = self._render(
                conversations=[list(messages)],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **{k: v for k, v in variables.items() if k not in _RESERVED}},
            )
        except Exception as error:  # the template is code that runs on the request's data
            if continue_final_message and str(error).startswith("continue_final_message"):
                raise BadRequest(
                    "continue_final_message: the model's chat template does not print the final message as it is.",
                    "continue_final_message",
                ) from error
            raise BadRequest(
                f"The model's chat template refuses these messages: {_reason(error)}", "messages"
            ) from error
        return text


#: What the renderer passes itself; a request's variables do not replace it.
_RESERVED = frozenset(
    (
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    )
)


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, jinja2.TemplateError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _sources(files: Mapping[str, str], config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name. `chat_template.jinja` wins over the key, as in transformers."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"]}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {str(named.get("name")): str(named.get("template")) for named in entry if isinstance(named, dict)}
    return {}


def parsed_arguments(arguments: str) -> object:
    """A tool call's arguments as templates want them: a mapping where the string is one, else the string."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
