from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.servers import Program, ServerFailed, sum_of
from loadtest.transport import Body

EXPOSITION = b"""# HELP sluicegate:resumes_total Choices that went on.
# TYPE sluicegate:resumes_total counter
sluicegate:resumes_total{exact="true"} 3.0
sluicegate:resumes_total{exact="false"} 2.0
sluicegate:engines_serving 1.0
"""


def test_a_metric_is_summed_over_its_labels() -> None:
    body = Body()
    body.data = EXPOSITION
    assert sum_of(body, "resumes_total") == 5
    assert sum_of(body, "resumes_total", 'exact="true"') == 3
    assert sum_of(body, "engines_serving") == 1
    assert sum_of(body, "resumes") == 0


def test_a_program_that_ends_is_said_with_its_last_words(tmp_path: Path) -> None:
    program = Program(["engine", "--no-such-flag"], tmp_path / "log")
    program.start()
    assert program._popen is not None
    program._popen.wait(30)
    with pytest.raises(ServerFailed, match="engine: it ended with status 2") as raised:
        program.check()
    assert "unknown option --no-such-flag" in str(raised.value)
    program.close()


def test_a_program_that_was_never_started_has_nothing_to_close(tmp_path: Path) -> None:
    Program(["engine"], tmp_path / "log").close()
