"""The client of a router's admin endpoints, and the tables of `twinpool status` and `twinpool check`.

The module imports little, as the commands must answer at once.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.processes.run_file import RunFile, newest_live_run
from contracts.errors import ConfigError, TwinpoolError

TIMEOUT_S = 60.0
"""How long one call may take: a check waits for each worker's step to end, which can take long on a slow machine."""
WATCH_S = 1.0
"""Seconds between two looks of `status --watch`."""
POLL_S = 0.2
"""How long a command waits between two looks at the workers."""
ASKED_AGAIN = 3
"""How often a look is asked for again whose connection breaks: another router of the port takes the next one."""
SHOWN_DECISIONS = 5
"""The autoscaler's latest decisions that `status` shows."""
SAY_EVERY_S = 5.0
"""How often a drain repeats a line that hasn't changed."""
STATUS_KEYS = (
    "name", "role", "state", "pid", "node", "incarnation", "running", "waiting", "pages_total", "pages_free",
    "counters", "stalled_s", "last_end", "waits", "breaker", "node_id", "cordoned", "plane", "settings",
    "build", "fingerprint", "unlinked",
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
    def find(cls, url: str | None, ca: str = "") -> AdminClient:
        """Return a client of the router at `url`, else at TWINPOOL_URL, else of this user's newest live cluster.

        `ca`, else TWINPOOL_CA, else what the cluster says, is the file of certificates that the router's is checked by.
        Raises `ClusterNotFound` without any of them.
        """
        given = url or os.environ.get("TWINPOOL_URL")
        if given:
            return cls(given, ca=ca or os.environ.get("TWINPOOL_CA", ""))
        run = newest_live_run()
        if run is None:
            raise ClusterNotFound("no cluster is running on this machine; start one with twinpool serve, or give --url")
        return cls.of_run(run, ca)

    @classmethod
    def of_run(cls, run: RunFile, ca: str = "") -> AdminClient:
        """Return a client of a cluster of this machine; `ca` as of `find`."""
        return cls(run.url, ca=ca or os.environ.get("TWINPOOL_CA", "") or run.ca)

    def status(self) -> dict[str, Any]:
        """Return ``workers``, a row for each with the keys of `STATUS_KEYS` only (a key that the router lacks is None),
        ``autoscaler`` where there is one, ``controllers``: who leads them, and who stands by, and ``routers``: a row
        for each that the controller hears of."""
        answer = self.call("GET", "/cluster/status")
        rows = [{key: row.get(key) for key in STATUS_KEYS} for row in answer["workers"]]
        return {"workers": rows} | {
            key: answer[key] for key in ("autoscaler", "controllers", "routers") if key in answer
        }

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
                answer: dict[str, Any] = json.loads(response.read())
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
        error = json.loads(body)["error"]
        return str(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""


_COLOURS = {"ready": "green", "starting": "cyan", "draining": "yellow", "left": "dim", "dead": "red"}


def status_table(workers: Sequence[Mapping[str, Any]]) -> Any:
    """Return a rich table of the workers."""
    table = plain_table(
        "worker", "state", "node", "pid", "start", "running", "waiting", "pages free", "pages", "plane", "settings"
    )
    for w in workers:
        colour = _COLOURS.get(w["state"], "default")
        state = "".join([w["state"], *_troubles(w)])
        cells = [
            w["node"],
            w["pid"] or "",
            w["incarnation"],
            w["running"],
            w["waiting"],
            w["pages_free"],
            w["pages_total"],
            w.get("plane") or "-",
            w.get("settings") or "-",
        ]
        table.add_row(w["name"], f"[{colour}]{state}[/]", *(str(cell) for cell in cells))
    return table


def _troubles(row: Mapping[str, Any]) -> list[str]:
    """Return what an operator should know of a worker besides its state, each part led by a comma."""
    found = []
    if row.get("waits"):
        found.append(f", waits for {row['waits']}")
    if row.get("stalled_s"):
        found.append(f", no progress for {row['stalled_s']:.0f} s")
    if row.get("unlinked"):
        found.append(f", the router has no link to it: {row['unlinked']}")
    if row.get("last_end"):
        found.append(f", last ended: {row['last_end']}")
    if row.get("breaker", "closed") != "closed":
        found.append(f", breaker {row['breaker']}")
    if retracted := (row.get("counters") or {}).get("retracted"):
        found.append(f", {retracted:.0f} retracted")
    return found


def autoscaler_view(autoscaler: Mapping[str, Any]) -> Any:
    """Return a rich table of each pool's size, bounds and need, with the autoscaler's latest decisions below it."""
    from rich.console import Group
    from rich.text import Text

    table = plain_table("pool", "needs because", "ready", "wanted", "least", "most", "need")
    for pool in autoscaler["pools"]:
        cells = [pool["ready"], pool["wanted"], pool["least"], pool["most"], _or_dash(pool["need"])]
        table.add_row(pool["role"], Text(pool["why"]), *(str(cell) for cell in cells))
    lines = [f"{one['ago_s']:,.0f} s ago: {one['text']}" for one in autoscaler["decisions"][:SHOWN_DECISIONS]]
    if autoscaler["held_s"]:
        lines.insert(0, f"held for {autoscaler['held_s']:,.0f} s more: an operator has changed a pool")
    return Group(table, *map(Text, lines))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def status_view(status: Mapping[str, Any]) -> Any:
    """Return what `twinpool status` shows: the workers, the controllers, and the autoscaler where there is one."""
    from rich.console import Group
    from rich.text import Text

    from cli.router_marks import router_lines

    parts = [status_table(status["workers"]), *builds_view(status["workers"])]
    parts += map(Text, router_lines(status.get("routers", ())))
    if "controllers" in status:
        parts.append(Text(controllers_line(status["controllers"])))
    if "autoscaler" in status:
        parts.append(autoscaler_view(status["autoscaler"]))
    return Group(*parts)


def builds_view(workers: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a line for each build where workers of several serve: an upgrade is under way, or was left."""
    from rich.text import Text

    builds: dict[str, list[str]] = {}
    for row in workers:
        if row.get("build") and row["state"] not in ("left", "dead"):
            builds.setdefault(row["build"], []).append(row["name"])
    return [Text(f"build {build}: {', '.join(names)}") for build, names in builds.items()] if len(builds) > 1 else []


def controllers_line(controllers: Mapping[str, Any]) -> str:
    """Return who leads the controllers and who stands by, in words."""
    leader, standbys = f"{controllers['leader']} (term {controllers['term']})", ", ".join(controllers["standbys"])
    if controllers["away"]:
        return f"no controller answers the router; the last that led was {leader}"
    return f"controller {leader} leads; {f'standing by: {standbys}' if standbys else 'none stands by'}"


def check_table(report: Mapping[str, Any]) -> Any:
    """Return a rich table of a check: the result and the numbers of what was recounted, for each worker."""
    table = plain_table("worker", "result", "pages", "slots", "leases", "rooms")
    for worker in report["workers"]:
        bad = len(worker["violations"])
        result = f"[red]{bad} violation{'s' if bad > 1 else ''}[/]" if bad else "[green]whole[/]"
        counts = [str(worker["checked"][key]) for key in ("pages", "slots", "leases", "rooms")]
        table.add_row(worker["name"], result, *counts)
    return table


def plain_table(*titles: str) -> Any:
    """Return an empty rich table; the first two columns and ``node`` are aligned left, the others right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < 2 or title == "node" else "right", no_wrap=True)
    return table
