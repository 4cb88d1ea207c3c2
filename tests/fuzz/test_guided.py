from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

SECONDS = 15


@pytest.mark.slow
def test_the_decoders_take_what_is_found_by_coverage(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="`pip install atheris` for coverage-guided fuzzing")
    command = [sys.executable, "-m", "tests.fuzz.guided", f"--seconds={SECONDS}"]
    fuzzed = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": ":".join([str(ROOT), *sys.path])}, capture_output=True, text=True
    )
    assert fuzzed.returncode == 0, fuzzed.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", fuzzed.stderr)
    assert done is not None
    assert int(done[1]) > 1000 * SECONDS  # 6,000 a second on a quiet core
    assert not list(tmp_path.iterdir())
