"""Chat templates: messages to the text a model was trained on.

A template is Jinja code from the model's folder. It runs in a sandbox, sees plain data only, and
whatever it raises is the request's fault (400) with the template's own words. The environment is
the one transformers documents for chat templates: blocks trimmed, loop controls, `tojson` that
leaves HTML alone, `raise_exception`, `strftime_now`, and `generation` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest
from protocol.bundle import BundleError

Message = dict[str, object]

#: Put behind the text that the answer continues, to find where it ended up. Its last character
#: tells whether the template trims what it prints.
_CONTINUE_MARK = "\ue000continue\ue000 "


class ChatTemplate:
    """A model's chat template, compiled once."""

    def __init__(
        self, files: Mapping[str, str], config: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> None:
        """`files` are a bundle's, `config` its tokenizer_config.json. A bundle may have no template.

        Raises BundleError for one that is not Jinja.
        """
        sources = _sources(files, config)
        try:
            self._templates = {name: _ENVIRONMENT.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(f"the chat template is not valid Jinja (line {error.lineno}): {error.message}") from error
        self._special_tokens = dict(special_tokens)
        #: Templates that know no developer role get its messages as the system's.
        self.knows_developer = any("developer" in source for source in sources.values())

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
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", "messages")
        shown = list(messages)
        if continue_final_message:
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}{_CONTINUE_MARK}"}
        try:
            text = template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": shown,
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # the template is code that runs on the request's data
            raise BadRequest(
                f"The model's chat template refuses these messages: {_reason(error)}", "messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


def _cut_at_mark(text: str) -> str:
    mark = _CONTINUE_MARK[:-1]
    before, found, after = text.rpartition(mark)
    if not found:
        raise BadRequest(
            "continue_final_message: the model's chat template does not print the final message as it is.",
            "continue_final_message",
        )
    before = before.replace(_CONTINUE_MARK, "")  # of a template that prints the message twice
    return before if after.startswith(_CONTINUE_MARK[-1]) else before.rstrip()


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


class _GenerationBlock(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks an answer for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    functions: dict[str, Callable[..., str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment


_ENVIRONMENT = _environment()


def parsed_arguments(arguments: str) -> object:
    """A tool call's arguments as templates want them: a mapping where the string is one, else the string."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
