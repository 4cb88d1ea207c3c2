"""Do tokenizer and chat template load, as a gateway will load them?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from engine.preflight.report import Report
from protocol import bundle

_ABOUT = "tokenizer"
_TEMPLATE = "chat template"
_REMEDY = "Take the tokenizer's files from the model's source again."


def check_tokenizer(folder: ModelFolder, vocab_size: int | None, report: Report) -> None:
    """`vocab_size` is the number of rows of the model's embedding, None where it is not known."""
    try:
        files = bundle.unpack(tokenizer_bundle(folder))
    except ModelError as error:
        report.problem(_ABOUT, str(error), _REMEDY)
        return
    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    except Exception as error:  # the library raises nothing more precise
        report.problem(_ABOUT, f"tokenizer.json cannot be loaded: {error}.", _REMEDY)
        return
    size = tokenizer.get_vocab_size()
    report.fact(_ABOUT, f"{size} tokens")
    if vocab_size is not None:
        beyond = [text for text, number in tokenizer.get_vocab().items() if number >= vocab_size]
        if beyond:
            report.warn(
                _ABOUT,
                f"{len(beyond)} tokens, such as {min(beyond)!r}, have no row in the embedding of {vocab_size}: prompts "
                "with them are refused.",
            )
    _check_template(files, report)


def _check_template(files: Mapping[str, str], report: Report) -> None:
    try:
        templates = dict(_templates(files))
        for source in templates.values():
            _ENVIRONMENT.parse(source)
    except jinja2.TemplateSyntaxError as error:
        report.problem(_TEMPLATE, f"The chat template is no Jinja: line {error.lineno}: {error.message}.", _REMEDY)
        return
    except (ValueError, TypeError) as error:
        report.problem(_TEMPLATE, f"tokenizer_config.json cannot be read: {error}.", _REMEDY)
        return
    if templates:
        report.fact(_TEMPLATE, ", ".join(sorted(templates)))
    else:
        report.warn(_TEMPLATE, "There is no chat template: /v1/completions works, /v1/chat/completions is refused.")


def _templates(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and source of each; a file of its own wins over the entry in the config."""
    if "chat_template.jinja" in files:
        yield "default", files["chat_template.jinja"]
        return
    entry = json.loads(files.get("tokenizer_config.json") or "{}").get("chat_template")
    if isinstance(entry, str):
        yield "default", entry
    for named in entry if isinstance(entry, list) else ():
        yield str(named["name"]), str(named["template"])


class _Generation(Extension):
    """The block in which templates mark what the assistant said."""

    tags = {"generation"}  # noqa: RUF012 - the library's own way

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)
