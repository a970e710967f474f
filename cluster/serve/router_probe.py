"""The liveness probe of the router process: it finds a router that hangs, which no exit code tells of."""

from __future__ import annotations

import http.client
import ssl
import threading

from contracts.clock import Clock

EVERY_S = 1.0
PATIENCE_S = 5.0
"""Timeout of one request to ``/live``; several of them fit into `router.stall_s`."""


def connection_to(host: str, port: int, *, https: bool, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the router that this process has started. Its certificate isn't checked, as it may be for other
    names than loopback's: nothing secret is said here, and the answer is whether it lives."""
    if not https:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


class RouterProbe:
    """Asks ``/live`` every `every_s` seconds on a thread of its own. It never acts: `serve` reads `silent_s`."""

    def __init__(self, host: str, port: int, clock: Clock, every_s: float = EVERY_S, *, https: bool = False) -> None:
        self._https = https
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._port, self._clock, self._every_s = port, clock, every_s
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

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            if self._answers():
                self._heard_at = self._clock.now()

    def _answers(self) -> bool:
        connection = connection_to(self._host, self._port, https=self._https, timeout_s=PATIENCE_S)
        try:
            connection.request("GET", "/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
