"""A model folder on disk: its files, read with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path

from engine.plan import LoadError


class ModelError(LoadError):
    """The model cannot be loaded. The text names the file or setting, and what to do."""


class ModelFolder:
    """A Hugging Face style directory. Opening one checks that it has a config.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ModelError(f"{path} is not a directory; name a folder that holds config.json and the weights.")
        if not self.has("config.json"):
            raise ModelError(f"{path} has no config.json; name a folder in the Hugging Face layout.")

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read_bytes(self, name: str) -> bytes:
        """Content of a file. Raises ModelError when it cannot be read."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise ModelError(f"{self.path / name} cannot be read: {error.strerror}.") from error

    def read_text(self, name: str) -> str:
        """Content of a UTF-8 file. Raises ModelError when it cannot be read or is not UTF-8."""
        try:
            return self.read_bytes(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path / name} is not UTF-8 text: {error}.") from error

    def read_object(self, name: str) -> dict[str, object]:
        """A file that holds one JSON object. Raises ModelError when it does not."""
        try:
            value = json.loads(self.read_bytes(name))
        except ValueError as error:
            raise ModelError(f"{self.path / name} is not JSON: {error}.") from error
        if not isinstance(value, dict):
            raise ModelError(f"{self.path / name} must hold a JSON object, not {type(value).__name__}.")
        return value
