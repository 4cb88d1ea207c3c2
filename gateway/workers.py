"""Several gateway processes on one port: the parent of `--workers N`, which serves nothing itself.

Workers are independent gateways that bind the same port (SO_REUSEPORT: the kernel spreads
connections over them) and add up their metrics through files in a folder the parent makes. One
that dies is started again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from gateway.config import GatewayConfig
from protocol.config import child_environ
from protocol.folders import private_folder
from protocol.ports import bound_socket
from protocol.process import Parent, Progress
from protocol.supervisor import ChildFailed, Program, Supervisor

log = logging.getLogger(__name__)

#: How prometheus_client is told that it is one of several; it looks when it is imported.
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def run(config: GatewayConfig, parent: Parent) -> int:
    """Run `config.workers` workers until told to stop; the exit status."""
    # Without SO_REUSEPORT, so that a port which somebody else has is refused here and not shared.
    with bound_socket(config.host, config.port) as probe:
        port = int(probe.getsockname()[1])
    with private_folder() as folder:
        config = config.model_copy(update={"port": port, "workers_dir": str(folder), "parent_pipe": None})
        try:
            asyncio.run(_supervise(config, str(folder), parent))
        except ChildFailed as error:
            log.error("gateway_failed", extra={"reason": str(error)})
            parent.give_up(str(error))
            return 1
    return 0


def forget_dead(folder: str) -> None:
    """Drop the gauges of workers that are gone, for a worker that starts: they would be shown for ever.

    Counters and histograms stay, since sums must not fall.
    """
    for file in Path(folder).glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]


async def _supervise(config: GatewayConfig, folder: str, parent: Parent) -> None:
    argv = (sys.executable, "-P", "-m", "sluicegate", "gateway", *config.to_argv(GatewayConfig))
    environ = child_environ(config.secrets(GatewayConfig)) | {_METRICS_VARIABLE: folder}
    workers = [
        Program(f"gateway-worker-{number}", argv, environ, config.shutdown_grace) for number in range(config.workers)
    ]
    supervisor = Supervisor([workers], _ignore)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, supervisor.stop)

    async def announce() -> None:
        log.info("workers_listening", extra={"host": config.host, "port": config.port, "workers": config.workers})
        parent.ready()

    await supervisor.run(announce)


def _ignore(_program: str, _step: Progress) -> None:
    """Workers have no way to ready worth showing."""
