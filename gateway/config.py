"""Options of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from gateway.engines import LinkSettings
from gateway.resume import DispatchSettings
from gateway.router import RouterSettings
from protocol.config import Internal, Settings, Shown

#: A body is refused over this or BODY_BYTES_PER_TOKEN times the longest context, whichever is more.
MIN_BODY_LIMIT = 2 * 2**20
BODY_BYTES_PER_TOKEN = 32


class GatewayConfig(Settings):
    """Speak OpenAI's HTTP, tokenize, route to engines, and stream their answers."""

    engine: tuple[str, ...] = Field((), description="Address of an engine, such as tcp://127.0.0.1:5557.")
    host: str = Field("127.0.0.1", description="Address to listen on for HTTP.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on for HTTP; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Gateway processes that share the port.")
    api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="Key that requests must carry (Authorization: Bearer); for all but /health and /ready.",
    )
    max_body_bytes: Annotated[int | None, Shown("2 MiB, or 32 bytes a token of context")] = Field(
        None, ge=1024, description="Largest body of a request that is read."
    )
    request_timeout: float = Field(
        60.0, gt=0, description="Seconds in which a request has to come whole, from its first byte to its last."
    )
    allow_unknown_fields: bool = Field(
        False,
        description="Ignore fields of requests that are not known, and log each name once, instead of refusing them.",
    )
    credit_wait: float = Field(
        10.0,
        ge=0,
        description="Seconds that a request waits in all, for an engine that is away (503) and for room there (429).",
    )
    resume_timeout: float = Field(
        30.0, ge=0, description="Seconds that a choice whose engine was lost waits for another one."
    )
    resume_attempts: int = Field(
        3, ge=1, description="Engines that may be lost under a choice in a row without a new token."
    )
    resume_inexact: Literal["allow", "refuse"] = Field(
        "allow", description="Whether a choice may go on with an engine of the same model but other numerics."
    )
    hang_timeout: Annotated[float | None, Shown("the engine's own")] = Field(
        None,
        gt=0,
        description="An engine with work and no finished step for this many seconds is left; can only lower its own.",
    )
    shutdown_grace: float = Field(
        5.0, ge=0, description="Seconds that open answers may go on after SIGTERM before they end with an error."
    )
    curve_secret_key_file: Path | None = Field(
        None, description="CURVE certificate with this gateway's secret key; for engines on other machines."
    )
    curve_server_key_file: Path | None = Field(
        None, description="CURVE certificate with the engines' public key; for engines on other machines."
    )

    workers_dir: Annotated[str | None, Internal()] = Field(
        None, description="Given to a worker: the folder through which workers add up their metrics."
    )

    def router_settings(self) -> RouterSettings:
        return RouterSettings(
            engines=self.engine,
            cache_dir=self.cache_dir,
            link=LinkSettings(hang_timeout_s=self.hang_timeout),
            curve_secret_key_file=self.curve_secret_key_file,
            curve_server_key_file=self.curve_server_key_file,
        )

    def dispatch_settings(self) -> DispatchSettings:
        return DispatchSettings(
            credit_wait_s=self.credit_wait,
            resume_timeout_s=self.resume_timeout,
            resume_attempts=self.resume_attempts,
            resume_inexact=self.resume_inexact == "allow",
        )
