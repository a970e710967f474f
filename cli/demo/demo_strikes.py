"""What `twinpool demo --chaos` does to its cluster while clients ask: kills, stops, drains, changes of pools."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinpool.cli.admin_client import AdminClient

Row = Mapping[str, Any]
Ready = Mapping[str, Sequence[Row]]
"""The workers that serve, by role."""
LOOKS, LOOK_S = 15, 0.2
"""How often, and at which distance in seconds, workers are looked at until one of them runs something."""


class DemoStrikes:
    """Strikes one after the other. The last worker of a role that serves is left alone: its pool would have to wait.

    A strike is to hit requests. So its victim is drawn by how many each worker runs, and where none runs any (prompts
    of the demo take milliseconds) the workers are looked at for a while; one that idles is struck only after that.
    """

    def __init__(
        self,
        operator: AdminClient,
        rng: random.Random,
        kill: Callable[[int, int], None] = os.kill,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause` waits for so many seconds."""
        self._operator, self._random, self._kill, self._pause = operator, rng, kill, pause
        self._next = 0
        self.done = 0

    def strike(self) -> str:
        """Strike once, where the pools are whole; returns what was done, in words. Raises `CommandRefused` and what
        `AdminClient` raises."""
        rows = self._operator.rows()
        if any(row["state"] not in ("ready", "left") for row in rows):
            return ""
        ready = {
            role: [row for row in rows if row["role"] == role and row["state"] == "ready"]
            for role in ("prefill", "decode")
        }
        strikes = (
            self._kill_decode, self._drain, self._kill_prefill, self._stop, self._change_role, self._scale,
        )  # fmt: skip
        said = strikes[self._next % len(strikes)](ready)
        self._next += 1
        self.done += bool(said)
        return said

    def _victim(self, rows: Sequence[Row]) -> Row | None:
        """One of several workers of a role on this host, drawn by how many requests each runs."""
        here: Sequence[Row] = ()
        for look in range(LOOKS):
            if look:
                self._pause(LOOK_S)
                kind = rows[0]["role"], "ready"
                rows = [row for row in self._operator.rows() if (row["role"], row["state"]) == kind]
            here = [row for row in rows if row["node"] == socket.gethostname() and row["pid"]]
            if len(rows) < 2 or not here:
                return None
            if busy := [row for row in here if row["running"]]:
                return self._random.choices(busy, [row["running"] for row in busy])[0]
        return self._random.choice(here)

    def _signal(self, rows: Sequence[Row], number: int, what: str) -> str:
        row = self._victim(rows)
        if row is None:
            return ""
        self._kill(row["pid"], number)
        return f"{row['name']} {what} while it ran {row['running']} requests"

    def _kill_decode(self, ready: Ready) -> str:
        return self._signal(ready["decode"], signal.SIGKILL, "was killed (SIGKILL)")

    def _kill_prefill(self, ready: Ready) -> str:
        return self._signal(ready["prefill"], signal.SIGKILL, "was killed (SIGKILL)")

    def _stop(self, ready: Ready) -> str:
        return self._signal(ready["decode"], signal.SIGSTOP, "was stopped for good (SIGSTOP)")

    def _drain(self, ready: Ready) -> str:
        row = self._victim(ready["decode"])
        if row is None:
            return ""
        name = urllib.parse.quote(row["name"], safe="")
        self._operator.call("POST", f"/cluster/restart/{name}")
        return f"{row['name']} drains and starts again; what it ran, {row['running']} requests, moves"

    def _change_role(self, ready: Ready) -> str:
        """Of the larger pool, so that the next one takes it back."""
        role = max(ready, key=lambda role: (len(ready[role]), role == "decode"))
        other = "prefill" if role == "decode" else "decode"
        row = self._victim(ready[role])
        if row is None:
            return ""
        self._operator.call("POST", f"/cluster/role/{urllib.parse.quote(row['name'], safe='')}?role={other}")
        return f"{row['name']} becomes a {other} worker, in the same process"

    def _scale(self, ready: Ready) -> str:
        """To two of each role, or to three decode workers where there are two."""
        wanted = 3 if (len(ready["prefill"]), len(ready["decode"])) == (2, 2) else 2
        self._operator.call("POST", f"/cluster/scale?prefill=2&decode={wanted}")
        return f"scaled to 2 prefill and {wanted} decode workers"
