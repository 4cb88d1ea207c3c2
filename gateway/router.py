"""Model name to the engines that serve it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.messages import Serving


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Times in seconds. `hang_timeout_s` None takes each engine's own figure."""

    engines: tuple[str, ...]
    cache_dir: Path
    hang_timeout_s: float | None = None
    credit_wait_s: float = 10.0
    resume_timeout_s: float = 30.0
    resume_attempts: int = 3
    resume_inexact: bool = True
    curve_secret_key_file: Path | None = None  # client keys, needed off loopback and ipc
    curve_server_key: str = ""  # the engines' public key (Z85)


class Router:
    """The fixed set of links, one for each engine address."""

    def __init__(self, settings: RouterSettings) -> None: ...

    async def start(self) -> None:
        """Open the links. Raises ValueError for an address that needs CURVE keys and has none."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Whether any engine serves."""
        raise NotImplementedError

    def models(self) -> list[Serving]:
        """What is served now, one entry a name, sorted by name."""
        raise NotImplementedError

    def serving(self, model: str) -> Serving:
        """Limits, defaults and bundle hash of a served name. Raises ModelNotFound or Unavailable."""
        raise NotImplementedError

    async def fetch_bundle(self, sha256: str) -> bytes:
        """The tokenizer bundle, verified: from the disk cache, else from an engine. Raises Unavailable."""
        raise NotImplementedError
