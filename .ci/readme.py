"""Writes the generated parts of README.md: `python .ci/readme.py`; with `--check` it only compares.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from gateway.config import GatewayConfig
from protocol import metrics
from protocol.config import markdown_table

README = Path(__file__).parents[1] / "README.md"

PARTS: dict[str, Callable[[], str]] = {
    "engine options": lambda: markdown_table(EngineConfig),
    "gateway options": lambda: markdown_table(GatewayConfig),
    "metrics": metrics.markdown_table,
}

_PART = re.compile(r"(?<=<!-- generated: )(?P<name>[a-z ]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def generated(text: str) -> str:
    """`text` with every generated part as it should be now. Raises KeyError for an unknown part."""
    return _PART.sub(lambda part: f"{part['name']} -->\n{PARTS[part['name']]()}", text)


def main() -> int:
    text = README.read_text("utf-8")
    wanted = generated(text)
    if text == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        sys.stderr.write("README.md is behind the code; run `python .ci/readme.py`.\n")
        return 1
    README.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
