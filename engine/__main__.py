"""Start-up of an engine process: settings, socket, model, step loop.

    python -m engine --backend fake --listen ipc:///tmp/engine.sock

The socket answers before the model is loaded, so that gateways see the phase and wait.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import backends
from engine.config import EngineConfig, Resolved, resolve
from engine.core import EngineCore
from engine.inbox import Inbox
from engine.metrics import EngineMetrics, MetricsServer
from engine.plan import LoadError, Progress, Runner
from engine.server import CurveKeys, ListenError, Server
from engine.sources import resolve as resolve_model
from engine.sources.reference import parse_reference
from engine.sources.remote import Unreachable
from engine.status import Status
from engine.step_log import StepLog
from protocol import logs
from protocol.process import EXIT_FAILED, EXIT_UNUSABLE, Parent
from protocol.progress import ProgressBar

log = logging.getLogger("engine")

#: The I/O thread and the step loop share the interpreter; the default of 5 ms would be a step's length.
SWITCH_INTERVAL_S = 2e-4

#: Loading progress is logged this often.
PROGRESS_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine until it is told to stop. 0 after a drain, 1 when it cannot start, 2 when it never could."""
    config = EngineConfig.from_command_line(sys.argv[1:] if argv is None else argv, prog="sluicegate engine")
    logs.configure(config.log_level, config.log_format)
    parent = Parent.attach(config.parent_pipe)
    log.info("engine_starting", extra={"pid": os.getpid(), "settings": config.describe()})
    try:
        engine = Engine(config)
    except ListenError as error:
        return _give_up(parent, str(error), EXIT_FAILED)
    try:
        _prepare_profiles(config.profile_dir)
        with contextlib.closing(_Loading(parent, alone=config.parent_pipe is None)) as progress:
            runner = backends.create(_with_folder(config, progress))
            resolved = engine.load(runner, progress)
    except Unreachable as error:
        engine.close()
        return _give_up(parent, str(error), EXIT_FAILED)
    except LoadError as error:
        engine.close()
        return _give_up(parent, str(error), EXIT_UNUSABLE)
    except Exception as error:
        log.exception("load_crashed")
        engine.close()
        return _give_up(parent, str(error) or type(error).__name__, EXIT_FAILED)
    engine.run(runner, resolved, parent)
    return 0


def _with_folder(config: EngineConfig, progress: Progress) -> EngineConfig:
    """`config` with the folder of its model, which is fetched if need be and looked at as a whole.

    Raises LoadError with every problem that can be told before weights are read.
    """
    if config.backend not in backends.OF_FOLDERS or config.model is None:
        return config
    # On use: it imports what the device's side shares.
    from engine.preflight.start import require_one_device, require_servable

    if not isinstance(parse_reference(config.model, config.revision), Path):
        require_one_device(config)  # before gigabytes are fetched in vain
    folder = resolve_model(
        config.model, cache_dir=config.cache_dir, revision=config.revision, offline=config.offline, progress=progress
    )
    progress("checking the model", 0, 0)
    require_servable(folder, config)
    return config.model_copy(update={"model": str(folder)})


def _prepare_profiles(folder: Path | None) -> None:
    """Make the folder for profiles. Raises LoadError when nothing can be written there."""
    if folder is None:
        return
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # its default would end the process until there is a runner to ask
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LoadError(
            f"--profile-dir {folder}: {error.strerror}. Name a folder in which the engine may write."
        ) from error


def _give_up(parent: Parent, reason: str, status: int) -> int:
    log.error("engine_failed", extra={"reason": reason})
    parent.give_up(reason)
    return status


class Engine:
    """The parts of a running engine process, joined."""

    def __init__(self, config: EngineConfig) -> None:
        """Binds the sockets. Raises ListenError."""
        curve = None
        if config.curve_secret_key_file and config.curve_allowed_keys_dir:
            curve = CurveKeys.load(config.curve_secret_key_file, config.curve_allowed_keys_dir)
        self._config = config
        self._inbox = Inbox()
        self._core: EngineCore | None = None
        self._metrics: EngineMetrics | None = None
        self._server = Server(
            config.listen,
            self._inbox,
            status=self._status,
            drain_timeout_s=config.drain_timeout,
            curve=curve,
            wakeup=_catch_signals(),
            step_log=None if config.step_log is None else StepLog(config.step_log),
        )
        self._http: MetricsServer | None = None
        if config.metrics_port is not None:
            try:
                self._http = MetricsServer(config.metrics_port, lambda: self._server.phase, self._exposition)
            except OSError as error:
                self._server.close()
                raise ListenError(f"--metrics-port {config.metrics_port}: {error.strerror}.") from error
            log.info("metrics_listening", extra={"port": self._http.port})
        log.info("engine_listening", extra={"address": self._server.address})

    def load(self, runner: Runner, progress: Progress) -> Resolved:
        """Load the model in this thread. Raises what the backend raises."""
        started = time.monotonic()
        info = runner.load(progress)
        resolved = resolve(self._config, info)
        log.info(
            "engine_loaded",
            extra={
                "seconds": round(time.monotonic() - started, 3),
                "model": resolved.public_name,
                "context_length": info.context_length,
                "num_blocks": info.num_blocks,
                "digest": info.digest,
                "numerics": info.numerics,
            },
        )
        return resolved

    def run(self, runner: Runner, resolved: Resolved, parent: Parent) -> None:
        """Serve until drained. Raises what the runner raises when its device is lost."""
        self._metrics = EngineMetrics(resolved)
        self._core = EngineCore(resolved, runner, self._inbox, self._server.deliver, self._metrics)
        # What start-up made lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._server.serve(resolved)
        parent.ready()
        log.info("engine_serving", extra={"address": self._server.address})
        try:
            self._core.run()
        finally:
            self.close()
            runner.close()
        log.info("engine_drained")

    def close(self) -> None:
        self._server.close()
        if self._http is not None:
            self._http.close()

    def _status(self) -> Status:
        return self._core.status if self._core is not None else Status()

    def _exposition(self) -> bytes:
        return self._metrics.exposition(self._status) if self._metrics is not None else b""


def _catch_signals() -> int:
    """Turn SIGTERM and SIGINT into bytes for the I/O thread; the descriptor to read them from.

    The C handler writes the byte whatever the main thread does, so a stop is heard during a long
    step or while weights load.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under a supervisor SIGINT is ignored
            signal.signal(number, lambda *_: None)
    return reader


class _Loading:
    """Where a load is, told to whoever waits: the supervisor; a person at a terminal, by a bar; else the log."""

    def __init__(self, parent: Parent, *, alone: bool) -> None:
        self._parent = parent
        self._bar = ProgressBar(wanted=alone)
        self._phase = ""
        self._began = self._logged_at = 0.0
        self._first = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._parent.progress(phase, done, total)
        self._bar(phase, done, total)
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._began, self._first = phase, now, done
        if not self._bar.draws and now - self._logged_at >= PROGRESS_S:
            self._logged_at = now
            told: dict[str, object] = {"phase": phase, "done": done, "total": total}
            if total:
                told["bytes_per_second"] = round((done - self._first) / max(now - self._began, 1e-3))
            log.info("engine_loading", extra=told)

    def close(self) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
