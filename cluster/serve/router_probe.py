"""The liveness probe of the router process: it finds a router that hangs, which no exit code tells of."""

from __future__ import annotations

import http.client
import socket
import threading
from pathlib import Path

from twinpool.contracts.clock import Clock

EVERY_S = 1.0
PATIENCE_S = 5.0
"""Timeout of one request to ``/live``; several of them fit into `router.stall_s`."""


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class RouterProbe:
    """Asks ``/live`` every `every_s` seconds on a thread of its own. It never acts: `serve` reads `silent_s`."""

    def __init__(self, path: Path, clock: Clock, every_s: float = EVERY_S) -> None:
        """`path`: the Unix socket of the one router that is asked; the endpoint's port may be shared by several."""
        self._path, self._clock, self._every_s = path, clock, every_s
        self._heard_at = clock.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router-probe", daemon=True)

    def start(self) -> None:
        self.started_again()
        self._thread.start()

    def started_again(self) -> None:
        """Count the silence from now on, because another router has been started."""
        self._heard_at = self._clock.now()

    @property
    def silent_s(self) -> float:
        """Seconds since the router last answered."""
        return self._clock.now() - self._heard_at

    def stop(self) -> None:
        """Stop asking. Idempotent; a request that is under way isn't waited for."""
        self._stop.set()

    def healthy(self) -> bool:
        """Whether the router says now that it can serve requests."""
        return self._answers("/health")

    def lives(self, within_s: float) -> bool:
        """Whether the router answers, asked again and again for so long."""
        deadline = self._clock.now() + within_s
        while not self._answers("/live"):
            if self._clock.now() >= deadline or self._stop.wait(self._every_s):
                return False
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            if self._answers("/live"):
                self._heard_at = self._clock.now()

    def _answers(self, path: str) -> bool:
        connection = UnixConnection(self._path, PATIENCE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
