"""`twinpool drain` and `twinpool role`, from the operator's side: ask the router, then follow the workers as they go.

What a draining worker waits for is in its status: requests that run and how many of them are left to finish, those on
their way to other workers, those that haven't begun, and rooms whose reader has not confirmed yet, by reader.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.admin import POLL_S, SAY_EVERY_S, Operator, Refused

HURRY_S = 30.0
"""How long a worker whose requests were started over elsewhere may still take to leave."""
OUTGOING = "outgoing_to:"
GONE = ("left", "died")


@dataclass(frozen=True)
class Progress:
    """One worker on its way out."""

    name: str
    state: str
    running: int = 0
    finishing: int = 0
    """Of those running: that end sooner than they could be handed on."""
    waiting: int = 0
    """Not begun."""
    leaving: int = 0
    """Of those running: under way to another worker."""
    outgoing: int = 0
    outgoing_to: dict[str, int] = field(default_factory=dict)
    """Rooms whose reader has not confirmed, by reader."""
    moved: int = 0
    moved_bytes: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any], before: Progress | None) -> Progress:
        """From a line of the router's status; what a worker that left had done is what it last said."""
        counters = row.get("counters") or {}
        if row["state"] in ("left", "dead", "starting"):
            done = before or cls(row["name"], row["state"])
            return cls(
                row["name"],
                "left" if row["state"] == "left" else "died",
                moved=done.moved,
                moved_bytes=done.moved_bytes,
            )
        to = {k.removeprefix(OUTGOING): int(v) for k, v in counters.items() if k.startswith(OUTGOING)}
        return cls(
            row["name"], row["state"], row["running"], int(counters.get("left_to_finish", 0)), row["waiting"],
            int(counters.get("leaving", 0)), row.get("outgoing", 0), to, int(counters.get("moved_out", 0)),
            int(counters.get("moved_out_bytes", 0)),
        )  # fmt: skip

    @property
    def waits_for(self) -> str:
        """In words; what it has done by now isn't part of it."""
        parts = []
        if self.running:
            how = [f"{self.finishing} to finish here"] * bool(self.finishing)
            how += [f"{self.leaving} on the way to other workers"] * bool(self.leaving)
            parts.append(f"{self.running} running" + (f" ({', '.join(how)})" if how else ""))
        if self.waiting:
            parts.append(f"{self.waiting} waiting")
        if self.outgoing:
            whom = ", ".join(f"{count} to {name}" for name, count in sorted(self.outgoing_to.items()))
            parts.append(f"{self.outgoing} outgoing transfers" + (f" ({whom})" if whom else ""))
        return ", ".join(parts) or "its last frames"


@dataclass(frozen=True)
class Report:
    """How a drain ended, or how far it is."""

    target: str
    seconds: float
    left: bool
    workers: tuple[Progress, ...]
    restarted: int = 0
    """Requests that were started over elsewhere when time was up."""
    why: str = ""
    """Why it has not left; empty when it has."""

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(w) | {"waits_for": "" if w.state in GONE else w.waits_for} for w in self.workers]
        return asdict(self) | {"seconds": round(self.seconds, 3), "workers": rows}


class Drain:
    """One drain of a worker or a node."""

    def __init__(
        self, operator: Operator, target: str, *, force: bool, timeout_s: float,
        show: Callable[[Report], None] = lambda report: None,
    ) -> None:  # fmt: skip
        """`show` gets every look at the workers."""
        self._operator, self._target = operator, target
        self._force, self._timeout_s, self._show = force, timeout_s, show
        self._restarted = 0
        self._hurried = False

    def run(self) -> Report:
        """Drain, and wait until all have left, or until it is clear that they don't. Raises `Refused`."""
        answer = self._operator.call("POST", f"/cluster/drain/{quoted(self._target)}{'?force=true' * self._force}")
        names = [row["name"] for row in answer.get("workers", [])] or [self._target]
        return self._follow(names)

    def _follow(self, names: Sequence[str]) -> Report:
        clock = self._operator.clock
        start, deadline = clock(), clock() + self._timeout_s
        last: dict[str, Progress] = {}
        drains = False
        while True:
            rows = {row["name"]: row for row in self._operator.rows()}
            for name in names:
                last[name] = Progress.of(rows.get(name, {"name": name, "state": "left"}), last.get(name))
            now = clock()
            workers = tuple(last[name] for name in names)
            report = Report(self._target, now - start, False, workers, self._restarted)
            states = {w.state for w in workers}
            if why := self._over(workers, drains):
                return Report(self._target, now - start, why == "left", workers, self._restarted, why * (why != "left"))
            drains = drains or "draining" in states
            if now >= deadline:
                if not self._force or self._hurried:
                    return self._late(report)
                self._hurry()
                deadline = now + HURRY_S
            self._show(report)
            self._operator.sleep(POLL_S)

    @staticmethod
    def _over(workers: Sequence[Progress], drains: bool) -> str:
        """ "left", or why it never will; empty while it goes on."""
        back = [w.name for w in workers if w.state == "ready"]
        if back and drains:
            return f"{' and '.join(back)} was undrained and stays"
        if any(w.state not in GONE for w in workers):
            return ""
        died = [w.name for w in workers if w.state == "died"]
        return f"{' and '.join(died)} died while it was draining" if died else "left"

    def _hurry(self) -> None:
        self._hurried = True
        answer = self._operator.call("POST", f"/cluster/drain/{quoted(self._target)}?now=true")
        self._restarted += answer.get("taken", 0)

    def _late(self, report: Report) -> Report:
        what = [f"{w.name} waits for {w.waits_for}" for w in report.workers if w.state not in GONE]
        kept = ", though what others could take was started over there" if self._hurried else ""
        why = f"{self._target} has not left after {report.seconds:g} s{kept}; {'; '.join(what)}; it goes on draining"
        return Report(self._target, report.seconds, False, report.workers, self._restarted, why)


class Lines:
    """Shows a drain in lines: each new thing that is waited for at once, the same again now and then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[str, tuple[str, float]] = {}

    def show(self, report: Report) -> None:
        for worker in report.workers:
            if worker.state != "draining":
                continue
            waits = worker.waits_for
            said, at = self._said.get(worker.name, ("", 0.0))
            if not said or report.seconds - at > (SAY_EVERY_S if waits == said else 1.0):
                self._say(f"{worker.name} is draining: waits for {waits}")
                self._said[worker.name] = waits, report.seconds


def ending(report: Report) -> str:
    """What is said when all have left."""
    moved = sum(w.moved for w in report.workers)
    parts = [f"{report.target} has left after {report.seconds:.1f} s"]
    if moved:
        parts.append(f"{moved} requests handed on, {sum(w.moved_bytes for w in report.workers) / 1e6:.1f} MB")
    if report.restarted:
        parts.append(f"{report.restarted} started over elsewhere")
    return "; ".join(parts)


def table(report: Report) -> Any:
    """A rich table of a drain, for `--watch`."""
    from cluster.admin import plain_table

    out = plain_table(
        "worker", "state", "running", "to finish", "leaving", "waiting", "outgoing", "moved", "MB moved", "waits for"
    )
    for w in report.workers:
        numbers = (w.running, w.finishing, w.leaving, w.waiting, w.outgoing, w.moved)
        waits = "" if w.state in GONE else w.waits_for
        out.add_row(w.name, w.state, *map(str, numbers), f"{w.moved_bytes / 1e6:.1f}", waits)
    return out


def change_role(operator: Operator, worker: str, role: str, *, force: bool, timeout_s: float) -> Report:
    """Have a worker drain and start again in another pool; returns when it serves there. Raises `Refused`."""
    before = operator.call("POST", f"/cluster/role/{quoted(worker)}?role={role}{'&force=true' * force}")
    start, last = operator.clock(), Progress(worker, "draining")
    while True:
        row = next((row for row in operator.rows() if row["name"] == worker), None)
        seconds = operator.clock() - start
        if row is not None and row["incarnation"] > before["incarnation"]:
            if row["role"] == role and row["state"] == "ready":
                return Report(worker, seconds, True, (last,))
        elif row is not None:
            last = Progress.of(row, last)
            if row["state"] == "left":
                raise Refused(f"{worker} has left and didn't come back")
        if seconds > timeout_s:
            waits = last.waits_for if row is not None and row["role"] != role else "its start"
            raise Refused(
                f"{worker} is no {role} worker after {seconds:g} s; it waits for {waits}. A node must have a free "
                f"place for it (Ray resource twinpool_{role})"
            )
        operator.sleep(POLL_S)


def quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
