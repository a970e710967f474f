"""What a cluster's pools did during a run, from looks at the status that its router shows of the controller's table."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.contracts.ids import PAIR, Role

SAME_S = 2.5
"""Two looks tell of one decision at times that differ by less: its age is told in the router's next report."""
UNREACHABLE = "unreachable"
"""Of a worker that the router couldn't ask in time: it is where it was."""
HERE = ("starting", "ready", "draining", UNREACHABLE)


class PoolWatch:
    """The pools of one run, look by look. Times are seconds since the run began."""

    def __init__(self, until_s: float = float("inf")) -> None:
        """`until_s`: when workers' seconds are no longer counted."""
        self._until_s = until_s
        self._last: tuple[float, int] | None = None
        self.worker_s = 0.0
        """Seconds of all workers, from their starts to their ends, drains included."""
        self.sizes: list[tuple[float, int, int]] = []
        """When, and the ready workers of both pools, whenever these changed."""
        self.wanted: list[tuple[float, int, int]] = []
        """When, and the sizes that the autoscaler is after, whenever these changed."""
        self.decisions: list[tuple[float, str]] = []
        self.counters: dict[str, int] = {}
        """How often the autoscaler has decided what."""
        self.ends: set[str] = set()
        """Why workers died; nobody should."""
        self.drain_s: dict[str, float] = {}
        """How long workers drained, by name; one that drained twice has the sum."""
        self._draining: dict[str, float] = {}

    def take(self, at_s: float, status: Mapping[str, Any]) -> None:
        """Take in a look: the answer of ``GET /cluster/status``."""
        rows = status["workers"]
        here = sum(row["state"] in HERE and not row["waits"] for row in rows)
        if self._last is not None:
            before, count = self._last
            self.worker_s += count * max(0.0, min(at_s, self._until_s) - min(before, self._until_s))
        self._last = at_s, here
        ready = Counter(row["role"] for row in rows if row["state"] == "ready")
        if not any(row["state"] == UNREACHABLE for row in rows):
            _changed(self.sizes, (at_s, ready[Role.PREFILL], ready[Role.DECODE]))
        self.ends |= {f"{row['name']}: {row['last_end']}" for row in rows if row["last_end"]}
        drains = {str(row["name"]) for row in rows if row["state"] == "draining"}
        unknown = {str(row["name"]) for row in rows if row["state"] == UNREACHABLE}
        for name in drains - set(self._draining):
            self._draining[name] = at_s
        for name in set(self._draining) - drains - unknown:
            self.drain_s[name] = self.drain_s.get(name, 0.0) + at_s - self._draining.pop(name)
        if (scaler := status.get("autoscaler")) is not None:
            self._scaler(at_s, scaler)

    def _scaler(self, at_s: float, scaler: Mapping[str, Any]) -> None:
        sizes = {pool["role"]: pool["wanted"] for pool in scaler["pools"]}
        if sizes:
            _changed(self.wanted, (at_s, sizes[Role.PREFILL], sizes[Role.DECODE]))
        self.counters = dict(scaler["counters"])
        for one in reversed(scaler["decisions"]):
            at, text = at_s - one["ago_s"], one["text"]
            if not any(text == known and abs(at - when) < SAME_S for when, known in self.decisions):
                self.decisions.append((at, text))

    def steps(self, which: int) -> list[tuple[float, int]]:
        """When, and by how many workers, the wanted size of a pool (0: prefill) changed."""
        return _steps(self.wanted, which)

    def turns(self) -> list[float]:
        """Seconds between two changes of the ready workers of a pool of which one undid the other's direction."""
        changes = [itertools.pairwise(_steps(self.sizes, which)) for which in range(len(PAIR))]
        return [at - before for pool in changes for (before, a), (at, b) in pool if (a > 0) != (b > 0)]


def _steps(kept: Sequence[tuple[float, int, int]], which: int) -> list[tuple[float, int]]:
    sizes = [(at, pools[which]) for at, *pools in kept]
    return [(at, size - before) for (_, before), (at, size) in itertools.pairwise(sizes) if size != before]


def _changed(kept: list[tuple[float, int, int]], now: tuple[float, int, int]) -> None:
    if not kept or kept[-1][1:] != now[1:]:
        kept.append(now)
