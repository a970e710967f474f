"""The commands `twinpool undrain`, `add`, `scale`, `restart`, `cordon`, `uncordon` and `adapters`: order, then follow
to the end.

The controller carries an order out whether or not this command is there. What it waits for is in the workers' rows: a
worker that starts must be ready in a later incarnation than before, one that leaves must have left or died.
"""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.cli.admin_client import POLL_S, SAY_EVERY_S, AdminClient, CommandRefused, RouterAway, client_for
from twinpool.cli.command_parser import FINE, REFUSED, print_line
from twinpool.cli.operator.cluster_rows import draining
from twinpool.cli.operator.drain_command import AWAY_S, check_timeout, quoted
from twinpool.contracts.errors import ConfigError

ROLES = ("prefill", "decode", "colocated")
STARTS, LEAVES = ("starts", "leaves and starts again", "is started elsewhere"), "leaves"


@dataclass(frozen=True)
class OrderedWorker:
    """A worker that an order concerns, as the router answered."""

    name: str
    incarnation: int
    """Its incarnation before the order; 0 where it is new."""
    outcome: str

    def done(self, row: Mapping[str, Any] | None) -> str:
        """What has become of it, in words, by its row now; empty while that isn't over."""
        if row is None:
            return ""
        if self.outcome == LEAVES:
            return "has left" if row["state"] == "left" else "is gone" if row["state"] == "dead" else ""
        ready = row["state"] == "ready" and row["incarnation"] > self.incarnation
        return f"serves on {row['node']}" if ready else ""


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Read ``prefill=2 decode=3``. Raises `ConfigError`."""
    sizes: dict[str, int] = {}
    for word in words:
        role, equals, count = word.partition("=")
        if role not in ROLES or not equals or not (count.isascii() and count.isdigit()):
            raise ConfigError(f"scale takes prefill=N, decode=N or colocated=N, got {word!r}")
        if role in sizes:
            raise ConfigError(f"scale names {role} twice")
        sizes[role] = int(count)
    return sizes


def order(operator: AdminClient, path: str, **query: str | int) -> list[OrderedWorker]:
    """Give one order; returns the workers that it concerns. Raises `CommandRefused` and `ClusterNotFound`."""
    given = {key: value for key, value in query.items() if value}
    answer = operator.call("POST", f"/cluster/{path}{'?' * bool(given)}{urllib.parse.urlencode(given)}")
    return [OrderedWorker(row["name"], row["incarnation"], row["outcome"]) for row in answer["workers"]]


def undrained(operator: AdminClient, target: str) -> tuple[list[OrderedWorker], list[str]]:
    """Undrain a worker or a node; returns the workers that are to serve again, and a line for each that couldn't be
    told. Raises `CommandRefused` and `ClusterNotFound`."""
    workers, refused = [], []
    for row in operator.call("POST", f"/cluster/undrain/{quoted(target)}").get("workers", []):
        outcome = row.get("outcome", "admits again")
        if row["state"] == "unreachable":
            refused.append(f"{row['name']} {outcome}")
            continue
        # One that still drains goes on as it is; one that has left comes back in a later incarnation.
        before = row.get("incarnation", 1) - (row["state"] not in ("left", "dead"))
        workers.append(OrderedWorker(row["name"], before, outcome))
    return workers, refused


def follow(
    operator: AdminClient, workers: Sequence[OrderedWorker], timeout_s: float, say: Callable[[str], None]
) -> float:
    """Wait until each worker has done what was ordered, saying a line as it has; returns the seconds.

    Raises `CommandRefused` when `timeout_s` is over, with what is still waited for. A router that stops answering
    meanwhile is waited for, `AWAY_S` or `timeout_s` at most.
    """
    start = heard = said = operator.clock()
    waiting = {worker.name: worker for worker in workers}
    rows: Mapping[str, Mapping[str, Any]] = {}  # As last seen: while no router answers, nobody has left the table.
    while waiting:
        now = operator.clock()
        try:
            rows, heard = {row["name"]: row for row in operator.rows()}, now
        except RouterAway:
            if now - heard >= min(AWAY_S, timeout_s):
                raise
        for name, worker in list(waiting.items()):
            if end := worker.done(rows.get(name)):
                say(f"{name} {end}")
                del waiting[name]
        if waiting and now - start >= timeout_s:
            raise CommandRefused(
                f"not done after {timeout_s:g} s, and goes on: "
                + "; ".join(_state(worker, rows.get(name), rows) for name, worker in waiting.items())
            )
        if waiting and now - said >= SAY_EVERY_S:
            said = now
            for name, worker in waiting.items():
                say(_state(worker, rows.get(name), rows))
        if waiting:
            operator.sleep(POLL_S)
    return operator.clock() - start


def _state(worker: OrderedWorker, row: Mapping[str, Any] | None, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What a worker is waited for, in words; `rows`: of all workers."""
    if row is None:
        return f"{worker.name} isn't in the table yet"
    if row["state"] == "draining":
        return draining(row, rows.values())
    why = f" (last ended: {row['last_end']})" if row.get("last_end") else ""
    return f"{worker.name} is {row['state']}{why} and {'has not left' if worker.outcome == LEAVES else 'should serve'}"


def restart_path(worker: str) -> str:
    return f"restart/{quoted(worker)}"


def undrain(args: argparse.Namespace) -> int:
    check_timeout(args.timeout)
    operator = client_for(args.url, args.ca, changes=True)[0]
    workers, refused = undrained(operator, args.worker)
    for line in (*(f"{one.name} {one.outcome}" for one in workers), *refused):
        print_line(line)
    if workers and not args.no_wait:
        print_line(f"done after {follow(operator, workers, args.timeout, print_line):.1f} s")
    return REFUSED if refused else FINE


def add(args: argparse.Namespace) -> int:
    return _change(args, "add", role=args.role, count=args.count, node=args.node)


def scale(args: argparse.Namespace) -> int:
    sizes = {role: str(count) for role, count in parse_sizes(args.sizes).items()}
    return _change(args, "scale", **sizes, force="true" * args.force)


def restart(args: argparse.Namespace) -> int:
    return _change(args, restart_path(args.worker), force="true" * args.force)


def _change(args: argparse.Namespace, path: str, **query: str | int) -> int:
    """Give an order and follow it, unless that isn't wanted."""
    check_timeout(args.timeout)
    operator, _ = client_for(args.url, args.ca, changes=True)
    workers = order(operator, path, **query)
    for worker in workers:
        print_line(f"{worker.name} {worker.outcome}")
    if not workers:
        print_line("nothing to do: the pools have so many workers already")
    elif not args.no_wait:
        print_line(f"done after {follow(operator, workers, args.timeout, print_line):.1f} s")
    return FINE


def cordon(args: argparse.Namespace) -> int:
    """Run `cordon` or `uncordon`."""
    operator, _ = client_for(args.url, args.ca, changes=True)
    for worker in order(operator, f"{args.command}/{quoted(args.node)}"):
        print_line(f"{worker.name} {worker.outcome}")
    print_line(f"{args.node} is {args.command}ed")
    return FINE


def adapters(args: argparse.Namespace) -> int:
    """Run `adapters`. Raises `ConfigError` for an action without what it needs."""
    if args.action == "list":
        operator, _ = client_for(args.url, args.ca, changes=False)
        served = operator.call("GET", "/cluster/status").get("adapters", [])
        if args.json:
            print_line(json.dumps({"adapters": served}, indent=2))
        for row in [] if args.json else served:
            held = f"in memory of {row['workers']} workers" if row["workers"] else "in no worker's memory"
            print_line(f"{row['name']}  {row['digest'][:12]}  {row['path']}  {held}")
        return FINE
    if not args.name or (args.action == "load") != bool(args.path):
        raise ConfigError("adapters takes list, load NAME FOLDER, or unload NAME")
    operator, _ = client_for(args.url, args.ca, changes=True)
    body: dict[str, Any] = {"lora_name": args.name}
    if args.action == "load":
        body |= {"lora_path": args.path, "load_inplace": args.replace}
    operator.call("POST", f"/v1/{args.action}_lora_adapter", json.dumps(body).encode())
    print_line(f"{args.name} is {'served' if args.action == 'load' else 'served no more'}")
    return FINE
