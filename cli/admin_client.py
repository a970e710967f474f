"""The cluster that a command acts on, and the client of its router's admin endpoints.

`--url` names the cluster, else TWINPOOL_URL does, else it is the only one of this machine, or for a look the newest. A
command that changes something refuses to choose among several. Which cluster it is, is said first, on standard error:
what a script reads on standard output stays as it is. This module imports little, as the commands must answer at once.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.cluster.processes.run_folder import START_REPORT, RunFile, live_runs
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
    "counters", "stalled_s", "last_end", "waits", "breaker", "node_id", "rank_nodes", "cordoned", "plane", "settings",
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
        model: str = "",
    ) -> None:
        """`ca`: the file of certificates by which the router's is checked; empty: the system's. `model`: the one that
        calls are about where the router serves several; empty: it serves one."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url takes http://HOST:PORT, got {url!r}")
        self._url, self._model = url.rstrip("/"), urllib.parse.quote(model, safe="")
        try:
            self._tls = ssl.create_default_context(cafile=ca or None) if parts.scheme == "https" else None
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"can't read the certificates {ca}: {error}") from None
        self.clock = clock
        self.sleep = sleep
        self._heard = False
        """Whether the router has answered before: if it doesn't answer later, it may be restarting (`RouterAway`)."""

    @classmethod
    def at(cls, url: str, ca: str = "", model: str = "") -> AdminClient:
        """Return a client of the router at `url`; `ca`, else TWINPOOL_CA, is the file of certificates that the router's
        is checked by, else the system's."""
        return cls(url, ca=ca or os.environ.get("TWINPOOL_CA", ""), model=model)

    @classmethod
    def of_run(cls, run: RunFile, ca: str = "", model: str = "") -> AdminClient:
        """Return a client of a cluster of this machine, checked by what the cluster says where nothing else does."""
        return cls.at(run.url, ca or os.environ.get("TWINPOOL_CA", "") or run.ca, model)

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
        if self._model:
            path += f"{'&' if '?' in path else '?'}model={self._model}"
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


@dataclass(frozen=True)
class ChosenCluster:
    """A cluster, and how it came to be chosen."""

    url: str
    run: RunFile | None
    """The cluster's run file; None where it isn't one of this machine, or another user's."""
    why: str
    """How it was chosen, in words; empty where the command line names it."""
    several: bool = False
    """Whether it is one of several, and nobody named it."""

    @property
    def up_s(self) -> float | None:
        """Seconds since it first served; None where that isn't known here."""
        return time.time() - self.run.since if self.run is not None and self.run.since else None

    def start_report(self) -> list[str]:
        """What `serve` wrote down of its start: how nodes are divided, and what workers hold."""
        file = Path(self.run.logs) / START_REPORT if self.run is not None else None
        if file is None or not file.is_file():
            return ["how its nodes were divided at the start isn't known here: see the logs where it was started"]
        return ["", f"at the start ({file}):", *file.read_text(errors="replace").splitlines()]

    @property
    def line(self) -> str:
        """What is said of it first."""
        named = f"cluster {self.url}" if self.run is None else f"cluster {described(self.run)}"
        return named + (f" ({self.why})" if self.why else "")


def choose(url: str | None, *, changes: bool) -> ChosenCluster:
    """Choose a cluster. `changes`: whether the command changes something. Raises `ClusterNotFound` where there is none,
    and `ConfigError` where a command that changes something would have to choose."""
    given = url or os.environ.get("TWINPOOL_URL", "")
    runs = live_runs()
    if given:
        run = next((run for run in runs if run.url == given.rstrip("/")), None)
        return ChosenCluster(given, run, "" if url else "of TWINPOOL_URL")
    if not runs:
        raise ClusterNotFound("no cluster is running on this machine; start one with twinpool serve, or give --url")
    if len(runs) == 1:
        return ChosenCluster(runs[0].url, runs[0], "the only one on this machine")
    if changes:
        said = f"{len(runs)} clusters run on this machine, and nothing was changed: say which one it is for"
        raise ConfigError(f"{said}\n{listed(runs)}")
    why = f"the newest of {len(runs)} on this machine; --url chooses another"
    return ChosenCluster(runs[0].url, runs[0], why, several=True)


def client_for(
    url: str | None, ca: str, model: str = "", *, changes: bool, say: Callable[[str], None] | None = None
) -> tuple[AdminClient, ChosenCluster]:
    """Choose a cluster and say which it is; returns a client of it. `model`: as of `AdminClient`. `say`: None for
    standard error. Raises as `choose`, and `ConfigError` for a URL that is none."""
    chosen = choose(url, changes=changes)
    (say or to_stderr)(chosen.line)
    run = chosen.run
    operator = AdminClient.at(chosen.url, ca, model) if run is None else AdminClient.of_run(run, ca, model)
    return operator, chosen


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def described(run: RunFile) -> str:
    """A cluster's URL, model, time and file, in words."""
    parts = [f"{run.url}, model {run.model}"]
    if run.since:
        parts.append(f"up {duration(time.time() - run.since)}")
    if run.config:
        parts.append(f"of {run.config}")
    if run.folder:
        parts.append("detached")
    return ", ".join(parts)


def listed(runs: Sequence[RunFile]) -> str:
    """A line for each cluster, that begins with the flag that chooses it."""
    return "\n".join(f"  --url {described(run)}" for run in runs)


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    left = max(0, round(seconds))
    days, hours, minutes = left // 86400, left // 3600 % 24, left // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left % 60} s" if minutes else f"{left} s"
