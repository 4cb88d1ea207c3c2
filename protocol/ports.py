"""TCP ports of our own HTTP."""

from __future__ import annotations

import errno
import logging
import socket
import time

log = logging.getLogger(__name__)

#: A port that is in use is tried for so long: a gateway whose parent was killed listens until it notices.
PATIENCE_S = 3.0
_RETRY_S = 0.1


class PortUnavailable(Exception):
    """The HTTP port cannot be had. The text says why and what to do."""


def bound_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A TCP socket on `port`, or on a free one where it is 0. Raises PortUnavailable."""
    until = time.monotonic() + PATIENCE_S
    is_told = False
    while True:
        try:
            return _bound(host, port, reuse_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise PortUnavailable(
                    f"cannot listen on {host} port {port}: {error.strerror}. Choose another with --port or --host."
                ) from error
        if not is_told:
            log.warning("port_in_use", extra={"host": host, "port": port, "patience_s": PATIENCE_S})
            is_told = True
        time.sleep(_RETRY_S)


def _bound(host: str, port: int, reuse_port: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
