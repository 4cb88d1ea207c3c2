"""The texts themselves, where they lie beside the project."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "seeds"


def read_texts() -> str:
    """All of them. Skips the test where they are not here."""
    files = sorted(FOLDER.glob("*.txt"))
    if not files:
        pytest.skip(f"no texts in {FOLDER}")
    return "\n".join(file.read_text("utf-8") for file in files)


def commands(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", text)
    return [" ".join(line.split()) for line in re.findall(r"^python -m .*$", joined, re.MULTILINE)]


def calls(text: str) -> list[dict[str, Any]]:
    found = []
    for source in re.findall(r"^llm = (LLM\(\n.*?^\))", text, re.MULTILINE | re.DOTALL):
        (call,) = ast.parse(source).body
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        found.append({keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords if keyword.arg})
    return found
