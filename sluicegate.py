"""The front door: the console script `sluicegate`, and `from sluicegate import LLM, SamplingParams`.

A command's code is imported when it is called, a name's when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from protocol.version import VERSION

if TYPE_CHECKING:
    from gateway.offline import LLM as LLM
    from gateway.offline import EngineError as EngineError
    from gateway.offline import RequestOutput as RequestOutput
    from gateway.offline import SamplingParams as SamplingParams

#: The Python interface; all of it is in this module.
_OFFLINE = "gateway.offline"
__all__ = ["LLM", "EngineError", "RequestOutput", "SamplingParams", "main"]

#: Command, where its `main(argv) -> int` is, and what it does.
COMMANDS = {
    "serve": ("sluicegate_serve:main", "serve a model from this machine: an engine and a gateway, kept running"),
    "engine": ("engine.__main__:main", "load a model onto this machine's device and serve it to gateways"),
    "gateway": ("gateway.__main__:main", "speak OpenAI's HTTP and pass the work on to engines"),
    "check": ("engine.preflight.command:main", "look at a model before it is loaded: what is wrong, and what fits"),
    "models": ("engine.sources.command:main", "fetch models into the cache, list, check and remove them"),
    "bench": ("loadtest.__main__:main", "put load on a server that speaks OpenAI's HTTP and measure it"),
}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_OFFLINE), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"sluicegate {VERSION}")
        return 0
    if words[0] not in COMMANDS:
        sys.stderr.write(f"sluicegate: unknown command {words[0]!r}.\n{_usage()}\n")
        return 2
    module, _, name = COMMANDS[words[0]][0].partition(":")
    command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
    return command(words[1:])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: sluicegate COMMAND ...", "", *lines, "", "`sluicegate COMMAND --help` lists a command's options."]
    )


if __name__ == "__main__":
    raise SystemExit(main())
