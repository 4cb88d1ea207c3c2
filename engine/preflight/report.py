"""What a look at a model found, as values: for a terminal, for programs, for an error text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

#: Problems of one kind beyond these are counted, not listed: a wrong config makes hundreds.
MOST_ALIKE = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, under one of the report's headings, and what to do about it."""

    about: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".rstrip()


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was found, under a heading."""

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each device, and what they are enough for.

    `pool` is None where the device's memory is not known; then nothing is said of what fits.
    """

    device: str
    num_devices: int
    total: int | None
    weights: int
    work: int
    pool: int | None
    kv_per_token: int
    context_length: int
    max_tokens: int | None
    max_context_length: int | None
    max_sequences: int | None


@dataclass(slots=True)
class Report:
    """All that was found of one model; filled by the checks."""

    model: str
    facts: list[Fact] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    memory: MemoryPlan | None = None

    @property
    def ok(self) -> bool:
        return not self.problems

    def fact(self, about: str, text: str) -> None:
        self.facts.append(Fact(about, text))

    def problem(self, about: str, text: str, remedy: str = "") -> None:
        self.problems.append(Problem(about, text, remedy))

    def alike(self, about: str, texts: Sequence[str], remedy: str) -> None:
        """Problems with one remedy: the first ones and how many more there are."""
        for text in texts[:MOST_ALIKE]:
            self.problem(about, text, remedy)
        if len(texts) > MOST_ALIKE:
            self.problem(about, f"{len(texts) - MOST_ALIKE} more problems like the last.")

    def warn(self, about: str, text: str) -> None:
        self.warnings.append(Problem(about, text))

    def to_json(self) -> dict[str, object]:
        return {"ok": self.ok, **asdict(self)}

    def error_text(self) -> str:
        """Every problem, for one who asked for the model and not for a report."""
        if len(self.problems) == 1:
            return f"{self.model}: {self.problems[0]}"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([f"{self.model} has {len(self.problems)} problems:", *lines])
