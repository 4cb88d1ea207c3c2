"""One engine and one gateway as processes, by their command lines: to be killed, stopped and watched."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from loadtest.transport import BadResponse, Body, ConnectionLost, HttpClient

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 10.0
_POLL_S = 0.03
_LOG_TAIL = 2000  # characters of a log that an error repeats


class ServerFailed(Exception):
    """A program did not do what it has to; the text ends with the last of its log."""


class TrialError(Exception):
    """The servers run, and cannot be put to the test; the text says why."""


class Program:
    """`sluicegate COMMAND ...`, in one life after another; its log is one file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, "-m", "sluicegate", *command]
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._popen is not None, "it was never started"
        return self._popen.pid

    def start(self) -> None:
        assert self._popen is None or self._popen.poll() is not None, "it runs"
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; it is gone on return."""
        assert self._popen is not None, "it was never started"
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """End it, whatever it does. Harmless when it has ended or never began."""
        if self._popen is None or self._popen.poll() is not None:
            return
        self._popen.send_signal(signal.SIGCONT)
        self._popen.terminate()
        try:
            self._popen.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def check(self) -> None:
        """Raises ServerFailed if it ended on its own account."""
        if self._popen is not None and (status := self._popen.poll()) is not None:
            raise ServerFailed(self.describe(f"it ended with status {status}"))

    def describe(self, text: str) -> str:
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"{self._command[3]}: {text}\n{log[-_LOG_TAIL:]}"


class Pair:
    """An engine and a gateway, joined by a socket in a private folder. Both run inside `async with`."""

    def __init__(
        self,
        engine_flags: Sequence[str],
        gateway_flags: Sequence[str] = (),
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="sg-"))  # a socket's path has at most 107 bytes
        address = f"ipc://{self._folder}/engine.sock"
        self.http_port, metrics_port = _free_ports(2)
        self.engine = Program(
            ["engine", *engine_flags, f"--listen={address}", f"--metrics-port={metrics_port}"],
            self._folder / "engine.log",
        )
        self.gateway = Program(
            ["gateway", f"--engine={address}", f"--port={self.http_port}", *gateway_flags], self._folder / "gateway.log"
        )
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.client = HttpClient(self.url)
        self._engine_client = HttpClient(f"http://127.0.0.1:{metrics_port}", keep_alive=False)

    async def __aenter__(self) -> Self:
        self.engine.start()
        self.gateway.start()
        try:
            await self.wait_until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__()
        await self._engine_client.__aexit__()
        self.gateway.close()
        self.engine.close()
        shutil.rmtree(self._folder)

    async def wait_until_ready(self) -> None:
        """Until the gateway has an engine that serves. Raises ServerFailed."""
        deadline = time.monotonic() + self._start_timeout_s
        while await self.status("/ready") != 200:
            self.engine.check()
            self.gateway.check()
            if time.monotonic() > deadline:
                raise ServerFailed(self.engine.describe(f"it does not serve after {self._start_timeout_s:g} s"))
            await asyncio.sleep(_POLL_S)

    async def status(self, path: str) -> int:
        """Of a GET at the gateway; 0 where nobody answers."""
        try:
            return (await self.client.get(path)).status
        except (OSError, ConnectionLost, BadResponse):
            return 0

    async def gateway_metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of a metric, of those only whose labels hold `label`."""
        return sum_of(await self.client.get("/metrics"), name, label)

    async def engine_metric(self, name: str) -> float:
        return sum_of(await self._engine_client.get("/metrics"), name)

    async def is_idle(self) -> bool:
        """Whether the engine has no request, and no block that is not free or only cached."""
        body = await self._engine_client.get("/metrics")
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(sum_of(body, name) for name in names)

    async def idle_within(self, seconds: float) -> float | None:
        """After how many seconds the engine was idle; None if it never was."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            if await self.is_idle():
                return waited
            await asyncio.sleep(_POLL_S)
        return None


def sum_of(exposition: Body, name: str, label: str = "") -> float:
    """Sum of a metric in Prometheus' text format, 0 where it has no sample."""
    total = 0.0
    for line in exposition.data.decode().splitlines():
        head, _, value = line.rpartition(" ")
        if not line.startswith("#") and head.partition("{")[0].rpartition(":")[2] == name and label in head:
            total += float(value)
    return total


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
