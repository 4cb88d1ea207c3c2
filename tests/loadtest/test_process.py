import multiprocessing
import os
import subprocess
import sys

import pytest

from loadtest.process import take_snapshot, use_between

BURN = """
import subprocess, sys, time
idle = "import sys; print(flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # its start-up is over
data = bytearray(64 << 20)
print("ready", flush=True)
sys.stdin.readline()
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("done", flush=True)
sys.stdin.readline()
child.communicate()
"""


def test_use_of_a_process_tree() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        before = take_snapshot([server.pid])
        server.stdin.write("go\n")
        server.stdin.flush()
        assert server.stdout.readline() == "done\n"
        use = use_between(before, take_snapshot([server.pid]))
        server.stdin.write("end\n")
    assert len(use.processes) == 2
    parent = next(process for process in use.processes if process.pid == server.pid)
    assert parent.cpu_s == pytest.approx(0.3, abs=0.05)
    assert use.cpu_s == pytest.approx(0.3, abs=0.08)
    assert 64 < parent.memory_mib.rss < 200
    assert 64 < parent.memory_mib.pss <= parent.memory_mib.rss <= parent.memory_mib.peak_rss + 1
    assert use.rss_mib > parent.memory_mib.rss
    assert use.wall_s >= 0.3
    assert 0 <= use.others_share <= 1


def test_pid_that_does_not_run_is_named() -> None:
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    with pytest.raises(ProcessLookupError, match=f"server pid {process.pid}: no such process"):
        take_snapshot([process.pid or 0])
    process.close()


def test_no_pids_no_tree() -> None:
    assert take_snapshot([]).tree == {}
