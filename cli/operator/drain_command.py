"""The commands `twinpool drain` and `twinpool role`: ask the router for the drain, then follow the workers' status.

What a draining worker waits for is in its status: the requests that run, how many of these are left to finish and how
many are migrating, the requests that haven't begun, and the rooms whose receiver has not confirmed yet, by receiver.

A drain is state of the workers and the controller, and goes on without this command and without the router. So the
command waits for a router that dies meanwhile; a restarted router answers ``starting`` until it has the controller's
table. For a node the command follows all workers that are on it at any look, also those drained by another operator:
the node has left when none is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twinpool.cli.admin_client import POLL_S, SAY_EVERY_S, AdminClient, CommandRefused, RouterAway, client_for
from twinpool.cli.command_parser import FINE, REFUSED, plain_table, print_line
from twinpool.contracts.errors import ConfigError

HURRY_S = 30.0
"""How long a worker may still take to leave after its requests were started over on other workers."""
AWAY_S = 120.0
"""How long a router may not answer: a dead one is started again, one that hangs is killed first (`router.stall_s`)."""
PASSING_S = 2.0
"""A worker that can't be reached may just be leaving: before this time of a drain no line says so."""
OUTGOING = "outgoing_to:"
"""Prefix of the status counters of rooms by receiver."""
GONE = ("left", "died", "not running", "elsewhere")
"""The final states of `DrainProgress`. "elsewhere": the worker's next incarnation is on another node; "not running":
the worker was dead before it was told to leave."""
NODE_ID_CHARS = 8
"""A Ray node id may be given by its first characters, if there are at least so many."""


@dataclass(frozen=True)
class DrainProgress:
    """The progress of one worker's drain, from its last status."""

    name: str
    state: str
    running: int = 0
    finishing: int = 0
    """Running requests that are left to finish here, as they end sooner than a migration would."""
    waiting: int = 0
    """Requests that haven't begun."""
    leaving: int = 0
    """Running requests that are migrating to another worker."""
    outgoing: int = 0
    """Rooms whose receiver has not confirmed yet."""
    outgoing_to: dict[str, int] = field(default_factory=dict)
    """The same rooms by the receiver's name."""
    migrated: int = 0
    """Requests that have migrated to other workers."""
    migrated_bytes: int = 0
    """Bytes of their state that were sent."""
    incarnation: int = 0
    """The incarnation that is to leave; 0 until a row has told it."""
    drained: bool = False
    """Whether the worker was seen draining: if it is ready after that, it was undrained."""
    shares: bool = False
    """Whether it shares its experts with others."""

    @classmethod
    def of(cls, row: Mapping[str, Any], before: DrainProgress | None, here: bool) -> DrainProgress:
        """Return the progress after one more row of the router's status; `before` is the progress until then.

        A worker that has left keeps `migrated` and `migrated_bytes` of its last row. `here`: whether the row's worker
        is on the node that is drained; True when a single worker is drained.
        """
        state, counters = row["state"], row.get("counters") or {}
        before = before or cls(row["name"], "")
        before = replace(before, incarnation=before.incarnation or row["incarnation"])
        if before.state in GONE and row["incarnation"] == before.incarnation:
            return before
        if row["incarnation"] > before.incarnation:
            # The worker has been started again, so the incarnation that was to leave has ended. One that is on another
            # node by now is no longer part of this drain.
            state = "dead" if here else "elsewhere"
        if state in ("left", "dead", "elsewhere"):
            died = "died" if before.state else "not running"
            how = {"left": "left", "elsewhere": "elsewhere"}.get(state, died)
            zero = cls(row["name"], how, incarnation=before.incarnation, drained=before.drained)
            return replace(zero, migrated=before.migrated, migrated_bytes=before.migrated_bytes)
        if state in ("unreachable", "starting"):
            return replace(before, state=state)
        to = {k.removeprefix(OUTGOING): int(v) for k, v in counters.items() if k.startswith(OUTGOING)}
        return cls(
            name=row["name"],
            state=row["state"],
            running=row["running"],
            finishing=int(counters.get("left_to_finish", 0)),
            waiting=row["waiting"],
            leaving=int(counters.get("leaving", 0)),
            outgoing=row.get("outgoing", 0),
            outgoing_to=to,
            migrated=int(counters.get("migrated_out", 0)),
            migrated_bytes=int(counters.get("migrated_out_bytes", 0)),
            incarnation=before.incarnation,
            drained=before.drained or state == "draining",
            shares="dp_steps" in counters,
        )

    @property
    def waits_for(self) -> str:
        """What the worker still has to do before it has left, in words."""
        if self.state == "unreachable":
            return "an answer: the router can't reach it"
        if self.state == "starting":
            return "its start elsewhere"
        if self.state == "ready":
            return "the news that it is to leave"
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
        shares = "its last frames, and for the drain of those with which it shares its experts"
        return ", ".join(parts) or (shares if self.shares else "its last frames")


@dataclass(frozen=True)
class DrainReport:
    """How a drain ended, or how far it has come; `left` is True once all workers have left."""

    target: str
    seconds: float
    left: bool
    workers: tuple[DrainProgress, ...]
    restarted: int = 0
    """Requests that were started over on other workers when time was up."""
    why: str = ""
    """Why the target has not left; empty when it has, and while the drain goes on."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        rows = [asdict(w) | {"waits_for": "" if w.state in GONE else w.waits_for} for w in self.workers]
        return asdict(self) | {"seconds": round(self.seconds, 3), "workers": rows}


class DrainCommand:
    """One drain of a worker or a node; call `run` once."""

    def __init__(
        self,
        operator: AdminClient,
        target: str,
        *,
        force: bool,
        timeout_s: float,
        show: Callable[[DrainReport], None] = lambda report: None,
    ) -> None:
        """Set up a drain that is waited for `timeout_s` seconds; `show` gets a report every `POLL_S` while it goes on.

        `force` drains even the last worker of a role, and after `timeout_s` has remaining requests started over on
        other workers.
        """
        self._operator, self._target = operator, target
        self._force, self._timeout_s, self._show = force, timeout_s, show
        self._restarted = 0
        self._hurried = False

    def run(self) -> DrainReport:
        """Order the drain and wait until all workers have left or died, one was undrained, or time is up.

        The report's `left` and `why` say which. Raises `CommandRefused` and `ClusterNotFound`. A router that stops
        answering meanwhile is waited for, `AWAY_S` or `timeout_s` at most, whichever is shorter.
        """
        answer = _give_order(self._operator, self._target, force=self._force)
        # An older router doesn't send `is_node`; there a node's answer is known by its other keys.
        is_node = answer.get("is_node", "node" in answer and "name" not in answer)
        rows = answer.get("workers") or ([] if is_node else [{"name": self._target, "state": "ready"}])
        last = {row["name"]: _told(row) for row in rows}
        return self._follow(last, is_node)

    def _follow(self, last: dict[str, DrainProgress], is_node: bool) -> DrainReport:
        clock = self._operator.clock
        start, deadline, heard = clock(), clock() + self._timeout_s, clock()
        while True:
            away = ""
            try:
                self._look(last, is_node)
                heard = clock()
            except RouterAway as error:
                away = str(error)
            now = clock()
            workers = tuple(last.values())
            report = DrainReport(self._target, now - start, False, workers, self._restarted)
            if not away and (why := self._over(workers)):
                return DrainReport(
                    self._target, now - start, why == "left", workers, self._restarted, why * (why != "left")
                )
            if away and now - heard >= min(AWAY_S, self._timeout_s):
                why = f"{away}; what has become of {self._target} isn't known, and its workers go on draining"
                return DrainReport(self._target, now - start, False, workers, self._restarted, why)
            if not away and now >= deadline:
                if not self._force or self._hurried:
                    return self._late(report)
                deadline = now + HURRY_S if self._hurry() else deadline
            self._show(report)
            self._operator.sleep(POLL_S)

    def _look(self, last: dict[str, DrainProgress], is_node: bool) -> None:
        """Read the workers' rows once, into `last`; a worker without a row stays as it was."""
        for row in self._operator.rows():
            here = not is_node or _is_on(row, self._target)
            name, state = row["name"], row["state"]
            if name in last or (is_node and here and state not in ("left", "dead")):
                last[name] = DrainProgress.of(row, last.get(name), here)

    @staticmethod
    def _over(workers: Sequence[DrainProgress]) -> str:
        """Return "left" once all have left, or why that will not happen; empty while the drain goes on."""
        back = [w.name for w in workers if w.state == "ready" and w.drained]
        if back:
            return f"{' and '.join(back)} was undrained and stays"
        if any(w.state not in GONE for w in workers):
            return ""
        died = [w.name for w in workers if w.state == "died"]
        return f"{' and '.join(died)} died while it was draining" if died else "left"

    def _hurry(self) -> bool:
        """Have what others can take started over there; False where the router was away, and it is asked again."""
        try:
            answer = self._operator.call("POST", f"/cluster/drain/{quoted(self._target)}?now=true")
        except RouterAway:
            return False
        self._hurried = True
        self._restarted += answer.get("taken", 0)
        return True

    def _late(self, report: DrainReport) -> DrainReport:
        what = [f"{w.name} waits for {w.waits_for}" for w in report.workers if w.state not in GONE]
        kept = ", though what others could take was started over there" if self._hurried else ""
        why = f"{self._target} has not left after {report.seconds:g} s{kept}; {'; '.join(what)}; it goes on draining"
        return DrainReport(self._target, report.seconds, False, report.workers, self._restarted, why)


def order_drain(operator: AdminClient, target: str, *, force: bool) -> list[str]:
    """Order a drain and don't wait; returns the workers that it concerns. Raises `CommandRefused` and
    `ClusterNotFound`."""
    return [row["name"] for row in _give_order(operator, target, force=force).get("workers") or [{"name": target}]]


def _give_order(operator: AdminClient, target: str, *, force: bool) -> dict[str, Any]:
    return operator.call("POST", f"/cluster/drain/{quoted(target)}{'?force=true' * force}")


class ProgressLines:
    """Prints a drain as lines, through `say`.

    A line that has changed is printed after a second at the earliest, the same line again after `SAY_EVERY_S`.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[str, tuple[str, float]] = {}

    def show(self, report: DrainReport) -> None:
        for worker in report.workers:
            if worker.state != "draining" and not (worker.state == "unreachable" and report.seconds >= PASSING_S):
                continue
            waits = worker.waits_for
            said, at = self._said.get(worker.name, ("", 0.0))
            if not said or report.seconds - at > (SAY_EVERY_S if waits == said else 1.0):
                self._say(f"{worker.name} is draining: waits for {waits}")
                self._said[worker.name] = waits, report.seconds


def ending(report: DrainReport) -> str:
    """Return the line that is printed when all workers have left."""
    migrated = sum(w.migrated for w in report.workers)
    parts = [f"{report.target} has left after {report.seconds:.1f} s"]
    if migrated:
        parts.append(f"{migrated} requests migrated, {sum(w.migrated_bytes for w in report.workers) / 1e6:.1f} MB")
    if report.restarted:
        parts.append(f"{report.restarted} started over elsewhere")
    return "; ".join(parts)


def _told(row: Mapping[str, Any]) -> DrainProgress:
    """Return a worker's progress as the router's answer to the drain has it."""
    said = row.get("state", "ready")
    state = "not running" if said in ("left", "dead") else said
    return DrainProgress(row["name"], state, incarnation=row.get("incarnation", 0), drained=said == "draining")


def _is_on(row: Mapping[str, Any], node: str) -> bool:
    nodes = [(row["node"], row.get("node_id") or ""), *(row.get("rank_nodes") or ())]
    return any(host == node or (len(node) >= NODE_ID_CHARS and node_id.startswith(node)) for host, node_id in nodes)


def table(report: DrainReport) -> Any:
    """Return a rich table of a drain, for `--watch`."""

    out = plain_table(
        "worker",
        "state",
        "running",
        "to finish",
        "leaving",
        "waiting",
        "outgoing",
        "migrated",
        "MB migrated",
        "waits for",
    )
    for w in report.workers:
        numbers = (w.running, w.finishing, w.leaving, w.waiting, w.outgoing, w.migrated)
        waits = "" if w.state in GONE else w.waits_for
        out.add_row(w.name, w.state, *map(str, numbers), f"{w.migrated_bytes / 1e6:.1f}", waits)
    return out


def order_role(operator: AdminClient, worker: str, role: str, *, force: bool) -> int:
    """Order a change of role and don't wait; returns the incarnation that leaves. Raises `CommandRefused` and
    `ClusterNotFound`."""
    answer = operator.call("POST", f"/cluster/role/{quoted(worker)}?role={role}{'&force=true' * force}")
    return int(answer["incarnation"])


def change_role(operator: AdminClient, worker: str, role: str, *, force: bool, timeout_s: float) -> DrainReport:
    """Have a worker drain and start again in another role; returns when it serves there.

    Raises `CommandRefused` where the router refuses, the worker leaves and isn't started again, or `timeout_s` is over,
    and `ClusterNotFound` without a router.
    """
    before = order_role(operator, worker, role, force=force)
    start, last = operator.clock(), DrainProgress(worker, "draining", incarnation=before)
    heard = start
    while True:
        seconds = operator.clock() - start
        try:
            row = next((row for row in operator.rows() if row["name"] == worker), None)
            heard = operator.clock()
        except RouterAway:
            if operator.clock() - heard >= min(AWAY_S, timeout_s):
                raise
            operator.sleep(POLL_S)
            continue
        if row is not None and row["incarnation"] > before:
            if row["role"] == role and row["state"] == "ready":
                return DrainReport(worker, seconds, True, (last,))
        elif row is not None:
            last = DrainProgress.of(row, last, True)
            if row["state"] == "left":
                raise CommandRefused(f"{worker} has left and didn't come back")
        if seconds > timeout_s:
            waits = last.waits_for if row is not None and row["role"] != role else "its start"
            raise CommandRefused(
                f"{worker} is no {role} worker after {seconds:g} s; it waits for {waits}. A node must have a free "
                f"place for it (Ray resource twinpool_{role})"
            )
        operator.sleep(POLL_S)


def quoted(name: str) -> str:
    """Return `name` quoted for one segment of a URL's path."""
    return urllib.parse.quote(name, safe="")


def drain(args: argparse.Namespace) -> int:
    check_timeout(args.timeout)
    operator = client_for(args.url, args.ca, args.model_name, changes=True)[0]
    if args.no_wait:
        for name in order_drain(operator, args.worker, force=args.force):
            print_line(f"{name} drains")
        return FINE

    def run(show: Callable[[DrainReport], None]) -> DrainReport:
        options = {"force": args.force, "timeout_s": args.timeout, "show": show}
        return DrainCommand(operator, args.worker, **options).run()

    if args.json:
        report = run(lambda r: print_line(json.dumps(r.as_json())) if args.watch else None)
        print_line(json.dumps(report.as_json()))
    elif args.watch and sys.stdout.isatty():
        from rich.live import Live

        with Live(refresh_per_second=5) as live:
            report = run(lambda r: live.update(table(r)))
            live.update(table(report))
    else:
        report = run(ProgressLines(print_line).show)
    if not report.left:
        print(f"error: {report.why}", file=sys.stderr)
    elif not args.json:
        print_line(ending(report))
    return FINE if report.left else REFUSED


def role(args: argparse.Namespace) -> int:
    check_timeout(args.timeout)
    operator = client_for(args.url, args.ca, args.model_name, changes=True)[0]
    if args.no_wait:
        order_role(operator, args.worker, args.role, force=args.force)
        print_line(f"{args.worker} drains and starts again as a {args.role} worker")
        return FINE
    report = change_role(operator, args.worker, args.role, force=args.force, timeout_s=args.timeout)
    print_line(f"{args.worker} serves as a {args.role} worker after {report.seconds:.1f} s")
    return FINE


def check_timeout(timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
