"""docs/quantizing.md as what it is: commands and scripts, which the tests run as they stand there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/quantizing.md"

_BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CONTINUED = "\\\n"


@dataclass(frozen=True, slots=True)
class Page:
    """Python blocks by their titles, and the lines of all shell blocks in order, continued ones joined."""

    scripts: dict[str, str]
    commands: tuple[str, ...]

    @classmethod
    def read(cls) -> Page:
        scripts: dict[str, str] = {}
        commands: list[str] = []
        for language, title, text in _BLOCK.findall(PAGE.read_text("utf-8")):
            if language == "python":
                scripts[title] = text
            if language == "sh":
                commands += [line.strip() for line in text.replace(_CONTINUED, " ").splitlines() if line.strip()]
        return cls(scripts, tuple(commands))

    def installing(self, tool: str) -> list[str]:
        """The commands that make the environment of a tool."""
        return [command for command in self.commands if f"venv-{tool}" in command and f"quantize_{tool}" not in command]

    def quantizing(self, tool: str) -> dict[str, str]:
        """The commands that run a tool, by the name of the folder that they write."""
        found = [command for command in self.commands if f"quantize_{tool}.py" in command]
        return {_after_script(command)[1]: command for command in found}

    def flags(self, command: str, target: str) -> list[str]:
        """What `sluicegate COMMAND ./TARGET` is given beside the folder; nothing where the page does not show it."""
        for line in self.commands:
            words = shlex.split(line, comments=True)
            if words[:3] == ["sluicegate", command, f"./{target}"]:
                return words[3:]
        return []


def _after_script(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    return words[next(place for place, word in enumerate(words) if word.endswith(".py")) + 1 :]
