from __future__ import annotations

import socket
import threading

import pytest

from protocol.ports import PortUnavailable, bound_socket


def test_a_free_port_is_chosen_for_zero() -> None:
    with bound_socket("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0


def test_a_port_in_use_is_waited_for() -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    timer = threading.Timer(0.3, holder.close)
    timer.start()
    with bound_socket("127.0.0.1", port) as bound:
        assert bound.getsockname() == ("127.0.0.1", port)
    timer.join()


def test_what_cannot_be_had_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.ports.PATIENCE_S", 0.15)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortUnavailable, match=f"127.0.0.1 port {port}: Address already in use.*--port or --host"):
            bound_socket("127.0.0.1", port)
    assert [record.message for record in caplog.records] == ["port_in_use"]  # once, however often it is tried
    with pytest.raises(PortUnavailable, match=r"cannot listen on 203\.0\.113\.1 port 1: "):
        bound_socket("203.0.113.1", 1)
