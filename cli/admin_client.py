"""The client of a router's admin endpoints. It imports little, as the commands must answer at once."""

from __future__ import annotations

import http.client
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from twinpool.cluster.processes.run_folder import RunFile
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.outside_data import read_json

TIMEOUT_S = 60.0
"""How long one call may take: a check waits for each worker's step to end, which can take long on a slow machine."""
WATCH_S = 1.0
"""Seconds between two looks of `status --watch`."""
POLL_S = 0.2
"""How long a command waits between two looks at the workers."""
ASKED_AGAIN = 3
"""How often a look is asked for again whose connection breaks: another router of the port takes the next one."""
SAY_EVERY_S = 5.0
"""How often a drain repeats a line that hasn't changed."""
STATUS_KEYS = (
    "name", "role", "state", "pid", "node", "incarnation", "running", "waiting", "pages_total", "pages_free",
    "counters", "stalled_s", "last_end", "waits", "breaker", "node_id", "cordoned", "plane", "settings",
    "build", "fingerprint", "unlinked",
)  # fmt: skip
CLUSTER_KEYS = (
    "model", "router_up_s", "tokens_per_s", "in_flight", "waiting", "autoscaler", "controllers", "routers",
)  # fmt: skip


class ClusterNotFound(TwinpoolError):
    """Raised when no router is found or answers."""


class RouterAway(ClusterNotFound):
    """Raised when a router doesn't answer now but may soon: it answered before, broke off, or has only just started."""


class _BrokenOff(RouterAway):
    """Raised when the connection broke before the answer was there: its router has just died, or was replaced."""


class CommandRefused(TwinpoolError):
    """Raised when the router refuses a call; the text is the router's reason."""


class AdminClient:
    """The client of one router's admin endpoints.

    Calls carry the token of TWINPOOL_ADMIN_TOKEN, an operator's key, if set. Raises `ConfigError` for a `url` that is
    neither http nor https.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        ca: str = "",
    ) -> None:
        """`ca`: the file of certificates by which the router's is checked; empty: the system's."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url takes http://HOST:PORT, got {url!r}")
        self._url = url.rstrip("/")
        try:
            self._tls = ssl.create_default_context(cafile=ca or None) if parts.scheme == "https" else None
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"can't read the certificates {ca}: {error}") from None
        self.clock = clock
        self.sleep = sleep
        self._heard = False
        """Whether the router has answered before: if it doesn't answer later, it may be restarting (`RouterAway`)."""

    @classmethod
    def at(cls, url: str, ca: str = "") -> AdminClient:
        """Return a client of the router at `url`; `ca`, else TWINPOOL_CA, is the file of certificates that the router's
        is checked by, else the system's."""
        return cls(url, ca=ca or os.environ.get("TWINPOOL_CA", ""))

    @classmethod
    def of_run(cls, run: RunFile, ca: str = "") -> AdminClient:
        """Return a client of a cluster of this machine, checked by what the cluster says where nothing else does."""
        return cls.at(run.url, ca or os.environ.get("TWINPOOL_CA", "") or run.ca)

    def status(self) -> dict[str, Any]:
        """Return ``url``; ``workers``, a row for each with the keys of `STATUS_KEYS` only (a key that the router lacks
        is None); and of `CLUSTER_KEYS` what the router told: ``model``, ``router_up_s`` and ``tokens_per_s``, how many
        requests are ``in_flight`` and how many of them ``waiting``, ``autoscaler`` where there is one, ``controllers``:
        who leads them, and who stands by, and ``routers``: a row for each that the controller hears of."""
        answer = self.call("GET", "/cluster/status")
        rows = [{key: row.get(key) for key in STATUS_KEYS} for row in answer["workers"]]
        return {"url": self._url, "workers": rows} | {key: answer[key] for key in CLUSTER_KEYS if key in answer}

    def check(self) -> dict[str, Any]:
        """Have all books recounted; returns ``{"ok", "workers": [{"name", "checked", "violations"}]}``."""
        return self.call("POST", "/cluster/check")

    def undrain(self, target: str) -> list[dict[str, Any]]:
        """Undrain a worker or a node; returns a row for each worker concerned, with its ``outcome``."""
        answer = self.call("POST", f"/cluster/undrain/{urllib.parse.quote(target, safe='')}")
        rows: list[dict[str, Any]] = answer.get("workers", [])
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """Return the router's row for each worker, with all keys."""
        rows: list[dict[str, Any]] = self.call("GET", "/cluster/status")["workers"]
        return rows

    def call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Call an admin path, with a `body` of JSON if any, and return the JSON answer. What only looks is asked again
        where the connection breaks; what changes something may have been done. Raises `CommandRefused` or
        `ClusterNotFound`."""
        for _ in range(ASKED_AGAIN if method == "GET" else 0):
            try:
                return self._call(method, path, body)
            except _BrokenOff:
                self.sleep(POLL_S)
        return self._call(method, path, body)

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if token := os.environ.get("TWINPOOL_ADMIN_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self._url + path, body, method=method, headers=headers)
        # A proxy of the environment can't reach a router on this machine or in this cluster.
        handlers = [urllib.request.HTTPSHandler(context=self._tls)] if self._tls is not None else []
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                answer: dict[str, Any] = read_json(response.read())
                self._heard = True
                return answer
        except urllib.error.HTTPError as error:
            message, code = _message(error.read())
            if code == "starting":
                raise RouterAway(f"the router at {self._url} has only just started: {message}") from None
            if message:
                raise CommandRefused(message) from None
            raise ClusterNotFound(f"what answers at {self._url} is not a Twinpool router ({error.code})") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            away: type[ClusterNotFound] = RouterAway
            if isinstance(reason, ConnectionResetError | BrokenPipeError | http.client.HTTPException):
                away = _BrokenOff
            elif isinstance(reason, ConnectionRefusedError) and not self._heard:
                away = ClusterNotFound
            raise away(f"no router answers at {self._url} ({reason})") from None
        except ValueError:
            raise ClusterNotFound(f"what answers at {self._url} is not a Twinpool router") from None


def _message(body: bytes) -> tuple[str, str]:
    """Return an error's message and code; both empty when the body isn't a router's."""
    try:
        error = read_json(body)["error"]
        return str(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""
