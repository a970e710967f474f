"""A router that no longer answers is noticed by its silence, although its process lives and its port is open."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from twinpool.cluster.serve import router_services
from twinpool.cluster.serve.router_services import RouterProbe
from twinpool.contracts.clock import ManualClock


class _Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path == "/live"
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


class UnixServer(socketserver.ThreadingUnixStreamServer):
    """An HTTP server on a Unix socket, whose handlers want a client's address."""

    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, _ = super().get_request()
        return connection, ("local", 0)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_c4_a_router_that_answers_is_heard_and_one_that_hangs_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(router_services, "PATIENCE_S", 0.05)
    clock = ManualClock()
    path = tmp_path / "live"
    with UnixServer(str(path), _Live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        probe = RouterProbe(path, clock, every_s=0.01)
        probe.start()
        clock.advance(50.0)
        until(lambda: probe.silent_s == 0.0)
        probe.stop()
        server.shutdown()
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        probe = RouterProbe(tmp_path / "mute", clock, every_s=0.01)
        probe.start()
        mute.accept()[0].close()
        clock.advance(50.0)
        mute.accept()[0].close()
        assert probe.silent_s == 50.0
        probe.started_again()
        assert probe.silent_s == 0.0
        probe.stop()


def test_a_router_that_is_asked_once_lives_or_is_silent_for_so_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(router_services, "PATIENCE_S", 60.0)
    clock = TickingClock()
    with UnixServer(str(tmp_path / "live"), _Live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert RouterProbe(tmp_path / "live", clock, every_s=0.01).lives(0.0)
        server.shutdown()
    asked = clock.now()
    assert not RouterProbe(tmp_path / "nobody", clock, every_s=0.01).lives(5.0)
    assert clock.now() - asked >= 5.0


class TickingClock(ManualClock):
    """A second passes whenever it is looked at."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()
