"""Programs of ours as processes, for tests that need the real thing: started, watched, always ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Limits of waiting. A start takes 2 s of processor time, so 20 s where eight programs want each of the two cores.
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
_POLL_S = 0.02


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """`sluicegate COMMAND ...` with its output in a file.

    The environment is the test's without any SLUICEGATE_ variable, plus `environ`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = log
        clean = {name: text for name, text in os.environ.items() if not name.startswith("SLUICEGATE_")}
        clean["PYTHONPATH"] = str(ROOT)
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "sluicegate", *command],
                cwd=cwd,
                env=clean | dict(environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        """All that it wrote to stdout and stderr up to now."""
        return self.log.read_text(errors="replace")

    def wait_for_output(self, text: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait until it wrote `text`; returns all it wrote. Fails when it ended without."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s:\n{self.output()}"
            time.sleep(_POLL_S)
        return self.output()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """Its exit status."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}") from None

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL; the process is gone on return."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """End it whatever its state, as a fixture does. Harmless when it has ended."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.popen.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()


class Engine(Process):
    """`sluicegate engine`, listening on `address`."""

    def __init__(self, address: str, flags: Sequence[str], log: Path) -> None:
        self.address = address
        super().__init__(["engine", f"--listen={address}", *flags], log)


class Server(Process):
    """A program that speaks HTTP on `port`: `sluicegate gateway` or `sluicegate serve`."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        super().__init__([*command, f"--port={port}"], log, cwd=log.parent, environ=environ)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; status 0 where nobody answers."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        return self._request("POST", path, json.dumps(body))

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it has an engine that serves."""
        deadline = time.monotonic() + timeout_s
        while self.get("/ready")[0] != http.HTTPStatus.OK:
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"not ready within {timeout_s} s:\n{self.output()}"
            time.sleep(_POLL_S)

    def _request(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionError:
            return 0, b""
        finally:
            connection.close()


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
