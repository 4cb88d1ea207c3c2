"""README.md: its tables are the code's, and its commands are the ones that CI runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / ".ci/readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date(generator: ModuleType) -> None:
    assert generator.generated(TEXT) == TEXT, "run `python .ci/readme.py`"


def test_every_part_is_on_the_page(generator: ModuleType) -> None:
    for name in generator.PARTS:
        assert f"<!-- generated: {name} -->" in TEXT


@pytest.mark.parametrize(
    "command", ["pip install -e '.[demo]' && sluicegate serve", "pip install -e '.[dev]' && pytest"]
)
def test_the_two_commands_are_on_the_page(command: str) -> None:
    assert f"```sh\n{command}\n```" in TEXT
