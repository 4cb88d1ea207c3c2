"""`sluicegate serve`: an engine and a gateway on this machine, kept running by one supervisor.

The only module that knows both sides; it is in neither package for that reason. The two are
joined by a socket in a private folder, and a gateway is given its path and nothing else.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from engine.backends import OF_FOLDERS
from engine.config import EngineConfig
from engine.loading.demo import NAME as DEMO_MODEL
from engine.loading.demo import ensure_demo_model
from engine.loading.store import ModelFolder
from engine.plan import LoadError
from engine.sources.reference import parse_reference
from gateway.config import GatewayConfig
from protocol import logs
from protocol.config import Positional, Settings, Shown, child_environ
from protocol.folders import private_folder
from protocol.logs import LogLevel
from protocol.ports import PortUnavailable, bound_socket
from protocol.progress import ProgressBar
from protocol.supervisor import ChildFailed, Program, Supervisor

log = logging.getLogger(__name__)

_READY_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_PROMPT = "Why is the sky blue?"
_MAX_TOKENS = 200  # a small model may go on for minutes

#: Status of a process that SIGINT ended, as shells have it.
_INTERRUPTED = 130


class ServeConfig(EngineConfig, GatewayConfig):
    """Serve a model from this machine: an engine and a gateway, kept running."""

    # The two are joined inside this machine, so keys for the way between machines have no use.
    decided: ClassVar[frozenset[str]] = frozenset(
        {
            "listen",
            "engine",
            "parent_pipe",
            "curve_secret_key_file",
            "curve_allowed_keys_dir",
            "curve_server_key_file",
        }
    )

    model: Annotated[str | None, Positional(), Shown("the demo model")] = Field(
        None, description="The model: a folder, ORG/NAME[@REVISION] of a hub, or s3://BUCKET/PREFIX."
    )
    # What a person waits for is the bar and the greeting, not a line for every request.
    log_level: Annotated[LogLevel, Shown("info, on a terminal warning")] = Field(
        default_factory=lambda: "warning" if sys.stderr.isatty() else "info",
        description="Least severe messages that are logged.",
    )


def main(argv: Sequence[str]) -> int:
    config = ServeConfig.from_command_line(argv, prog="sluicegate serve")
    logs.configure(config.log_level, config.log_format)
    bar = ProgressBar()
    try:
        config = config.model_copy(update={"port": available_port(config.host, config.port)})
        if config.backend in OF_FOLDERS:
            config = with_model(config, bar)
        return asyncio.run(serve(config, bar))
    except (PortUnavailable, LoadError, ChildFailed) as error:
        bar.close()
        sys.stderr.write(f"sluicegate serve: {error}\n")
        return 1
    except KeyboardInterrupt:  # before the supervisor took SIGINT over
        return _INTERRUPTED
    finally:
        bar.close()


def with_model(config: ServeConfig, bar: ProgressBar) -> ServeConfig:
    """`config` with a model that is there: the one named, else the demo model. Raises LoadError."""
    if config.model is not None:
        reference = parse_reference(config.model, config.revision)
        if isinstance(reference, Path):
            ModelFolder(reference)  # the rest the engine says, before it loads anything
        return config
    model = ensure_demo_model(config.cache_dir, bar)
    name = config.served_model_name or DEMO_MODEL
    return config.model_copy(update={"model": str(model), "served_model_name": name})


async def serve(config: ServeConfig, bar: ProgressBar) -> int:
    """Run both programs until SIGINT or SIGTERM; the exit status. Raises ChildFailed."""
    with private_folder() as folder:
        supervisor = Supervisor(programs(config, folder), bar.show)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, supervisor.stop)

        async def announce() -> None:
            model = await served_model(config)
            bar.close()
            print(greeting(config, model), flush=True)

        await supervisor.run(announce)
        return _INTERRUPTED if supervisor.killed else 0


def programs(config: ServeConfig, folder: Path) -> list[list[Program]]:
    """Engines, then gateways: the order of starting, and the reverse of stopping."""
    address = f"ipc://{folder}/engine.sock"
    # Children write to the same terminal, so they take the supervisor's word for what it is.
    style = "text" if sys.stderr.isatty() else "json"
    told = {"listen": address, "engine": (address,)}
    if config.log_format == "auto":
        told["log_format"] = style
    config = config.model_copy(update=told)
    engine = _program("engine", config, EngineConfig, config.drain_timeout)
    gateway = _program("gateway", config, GatewayConfig, config.shutdown_grace)
    return [[engine], [gateway]]


def _program(name: str, config: ServeConfig, settings: type[Settings], grace_s: float) -> Program:
    # `-P`: a folder called `engine` where the user happens to be is not ours.
    argv = (sys.executable, "-P", "-m", "sluicegate", name, *config.to_argv(settings))
    environ = child_environ(config.secrets(settings))
    return Program(name, argv, environ, grace_s)


def available_port(host: str, port: int) -> int:
    """`port`, or one that is free where it is 0. Raises PortUnavailable, before anything is loaded."""
    with bound_socket(host, port) as probe:
        return int(probe.getsockname()[1])


async def served_model(config: ServeConfig) -> str:
    """Wait until the gateway serves the engine's model; returns the name that requests use.

    One question that answers both: between two the engine may have died.
    """
    while True:
        status, body = await asyncio.to_thread(get, config, "/v1/models")
        if status == http.HTTPStatus.OK and (served := json.loads(body)["data"]):
            return str(served[0]["id"])
        await asyncio.sleep(_READY_POLL_S)


def get(config: ServeConfig, path: str) -> tuple[int, bytes]:
    """Status and body of a GET to the gateway; status 0 where nobody answers."""
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key.get_secret_value()}"}
    connection = http.client.HTTPConnection(local_host(config), config.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def greeting(config: ServeConfig, model: str) -> str:
    """The URL, and a line to paste that streams an answer."""
    messages = [{"role": "user", "content": _PROMPT}]
    body = {"model": model, "stream": True, "max_tokens": _MAX_TOKENS, "messages": messages}
    words = ["curl", "-N", f"{url(config)}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body)])
    if config.api_key is not None:
        line += ' -H "Authorization: Bearer $SLUICEGATE_API_KEY"'
    return f"\n{model} is served at {url(config)}/v1\n\n  {line}\n"


def url(config: ServeConfig) -> str:
    host = local_host(config)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def local_host(config: ServeConfig) -> str:
    """Where a client on this machine reaches the gateway."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
