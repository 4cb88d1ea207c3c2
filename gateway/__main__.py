"""Start-up of a gateway process: settings, links, HTTP server.

python -m gateway --engine tcp://127.0.0.1:5557 --port 8000
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from gateway import workers
from gateway.app import Access, create_app
from gateway.config import GatewayConfig
from gateway.dealer import AddressError
from gateway.measures import Measures
from gateway.resume import Dispatcher
from gateway.router import Router
from gateway.server import Server
from gateway.service import Service
from gateway.texts import Texts
from protocol import logs, metrics
from protocol.ports import PortUnavailable, bound_socket
from protocol.process import EXIT_UNUSABLE, Parent

log = logging.getLogger("gateway")

#: Objects more than at the last collection (a request is 200); young collections before one of those older; and of
#: these before a full one.
_COLLECT_EVERY = (2000, 50, 10)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until it is told to stop. 0 after a stop, 2 for settings it cannot run with."""
    config = GatewayConfig.from_command_line(sys.argv[1:] if argv is None else argv, prog="sluicegate gateway")
    logs.configure(config.log_level, config.log_format)
    parent = Parent.attach(config.parent_pipe)
    try:
        if config.workers > 1 and config.workers_dir is None:
            return workers.run(config, parent)
        return serve(config, parent)
    except (AddressError, PortUnavailable, OSError) as error:
        log.error("gateway_failed", extra={"reason": str(error)})
        parent.give_up(str(error))
        return EXIT_UNUSABLE


def serve(config: GatewayConfig, parent: Parent) -> int:
    """Serve in this process. Raises AddressError for an engine's address, PortUnavailable for the HTTP one."""
    if config.workers_dir is not None:
        workers.forget_dead(config.workers_dir)
    registry = CollectorRegistry()
    instruments = metrics.build(metrics.Owner.GATEWAY, registry)
    router = Router(config.router_settings(), instruments)
    dispatcher = Dispatcher(router, config.dispatch_settings(), instruments)
    texts = Texts(router, on_loaded=gc.freeze)
    service = Service(router, dispatcher, texts, Measures(instruments), config.allow_unknown_fields)
    access = Access(
        api_key=config.api_key.get_secret_value() if config.api_key is not None else "",
        max_body_bytes=config.max_body_bytes or 0,
    )
    app = create_app(service, registry, access, config.workers_dir)
    with bound_socket(config.host, config.port, reuse_port=config.workers_dir is not None) as bound:
        host, port = bound.getsockname()[:2]

        def on_listening() -> None:
            # What has been imported stays: the collector need not walk it at every full collection. A request that is
            # over leaves it nothing to find, so it walks what lives, which holds up every stream: 9 ms at 256 of them.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_COLLECT_EVERY)
            log.info("gateway_listening", extra={"host": host, "port": port, "pid": os.getpid()})
            parent.ready()

        Server(
            app,
            dispatcher,
            request_timeout_s=config.request_timeout,
            grace_s=config.shutdown_grace,
            on_listening=on_listening,
        ).run([bound])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
