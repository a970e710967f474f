"""The commands `twinpool undrain`, `add`, `scale`, `restart`, `cordon`, `uncordon` and `adapters`, and those that
change what all workers serve (`serving_commands`): order, then follow to the end.

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
from twinpool.cli.command_parser import FINE, REFUSED, Command, CommandFlag, command, flag, print_line, switch
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
    operator = client_for(args.url, args.ca, args.model_name, changes=True)[0]
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
    operator, _ = client_for(args.url, args.ca, args.model_name, changes=True)
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
    operator, _ = client_for(args.url, args.ca, args.model_name, changes=True)
    for worker in order(operator, f"{args.command}/{quoted(args.node)}"):
        print_line(f"{worker.name} {worker.outcome}")
    print_line(f"{args.node} is {args.command}ed")
    return FINE


def adapters(args: argparse.Namespace) -> int:
    """Run `adapters`. Raises `ConfigError` for an action without what it needs."""
    if args.action == "list":
        operator, _ = client_for(args.url, args.ca, args.model_name, changes=False)
        served = operator.call("GET", "/cluster/status").get("adapters", [])
        if args.json:
            print_line(json.dumps({"adapters": served}, indent=2))
        for row in [] if args.json else served:
            held = f"in memory of {row['workers']} workers" if row["workers"] else "in no worker's memory"
            print_line(f"{row['name']}  {row['digest'][:12]}  {row['path']}  {held}")
        return FINE
    if not args.name or (args.action == "load") != bool(args.path):
        raise ConfigError("adapters takes list, load NAME FOLDER, or unload NAME")
    operator, _ = client_for(args.url, args.ca, args.model_name, changes=True)
    body: dict[str, Any] = {"lora_name": args.name}
    if args.action == "load":
        body |= {"lora_path": args.path, "load_inplace": args.replace}
    operator.call("POST", f"/v1/{args.action}_lora_adapter", json.dumps(body).encode())
    print_line(f"{args.name} is {'served' if args.action == 'load' else 'served no more'}")
    return FINE


# ------------------------------------------------------------ what is served


def weights(args: argparse.Namespace) -> int:
    """Run `weights`. Raises `ConfigError` for an update without a folder, or a way back with one."""
    if args.action == "status":
        operator, _ = client_for(args.url, args.ca, args.model_name, changes=False)
        served = operator.call("GET", "/v1/weights")
        for line in [json.dumps(served, indent=2)] if args.json else weights_lines(served):
            print_line(line)
        return FINE
    back = args.action == "revert"
    if bool(args.folder) == back or (back and args.version):
        raise ConfigError("weights takes status, update FOLDER, or revert, which has neither a folder nor a version")
    body: dict[str, Any] = (
        {"rolling": args.rolling} if args.wait is None else {"rolling": args.rolling, "wait_s": args.wait}
    )
    if back:
        return _serve_otherwise(args, "weights/revert", body)
    return _serve_otherwise(args, "weights", body | {"path": args.folder, "version": args.version})


def serving(args: argparse.Namespace) -> int:
    """Run `flush`, `pause`, `resume`, `sleep` or `wake`."""
    given = {"level": getattr(args, "level", None), "wait_s": getattr(args, "wait", None)}
    return _serve_otherwise(args, args.command, {key: value for key, value in given.items() if value is not None})


def _serve_otherwise(args: argparse.Namespace, path: str, body: Mapping[str, Any]) -> int:
    """Give an order that all workers follow, and wait until they have, or it was given up. Raises `CommandRefused`."""
    check_timeout(args.timeout)
    operator, _ = client_for(args.url, args.ca, args.model_name, changes=True)
    before = operator.call("GET", "/v1/weights")["tried"]
    operator.call("POST", f"/v1/{path}", json.dumps({**body, "wait": False}).encode())
    deadline = operator.clock() + args.timeout
    while not args.no_wait:
        try:
            served = operator.call("GET", "/v1/weights")
        except RouterAway:
            served = None
        if served is not None and path.startswith("weights") and served["failed"] and served["tried"] > before:
            raise CommandRefused(f"the weights stay as they are: {served['failed']}")
        if served is not None and _followed(path, served, before):
            for line in weights_lines(served):
                print_line(line)
            return FINE
        if operator.clock() >= deadline:
            raise CommandRefused(f"not through after {args.timeout:g} s; it goes on (twinpool weights status)")
        operator.sleep(POLL_S)
    print_line("ordered; see how far it is by twinpool weights status")
    return FINE


def _followed(order: str, served: Mapping[str, Any], before: int) -> bool:
    """Whether all workers have followed an order. `before`: the number of the latest change before it."""
    states = [row["state"] for row in served["workers"]]
    running = [row for row in served["workers"] if row["state"] not in ("left", "dead")]
    if order in ("weights", "weights/revert", "flush"):
        begun = served["tried"] > before and served["pending"] is None
        return begun and not served["behind"] and bool(running) and all(state in ("ready", "left") for state in states)
    if order == "sleep":
        return bool(served["asleep"]) and not running
    if order == "wake":
        return not served["asleep"] and bool(running) and all(state in ("ready", "left") for state in states)
    return served["paused"] == (order == "pause") and all(row["paused"] == served["paused"] for row in running)


def weights_lines(served: Mapping[str, Any]) -> list[str]:
    """What is served, and how far a change is, in words."""
    state = f"asleep (level {served['asleep']})" if served["asleep"] else "paused" if served["paused"] else "serving"
    lines = [f"{state}  weights {served['weights_version']}  {served['weights']['path'] or 'the checkpoint'}"]
    if served["pending"]:
        lines.append(f"being prepared: {served['pending']['path'] or 'the checkpoint'}")
    if served["failed"]:
        lines.append(f"the latest change was given up: {served['failed']}")
    for row in served["workers"]:
        told = " prepared" * row["prepared"] + " paused" * row["paused"]
        lines.append(f"{row['name']}  {row['state']}  {row['weights_version']}{told}")
    return lines


_WAIT = flag(
    "--wait", "seconds for which requests that run may go on as they are (30; rolling: 600)", type=float, metavar="S"
)


def serving_commands(*followed: CommandFlag) -> tuple[Command, ...]:
    """The commands that change what all workers serve; `followed`: flags of all that are followed to the end."""
    return (
        command(
            "weights",
            "change the weights while serving, or show which are served",
            weights,
            flag("action", "update, revert (to the checkpoint) or status", choices=("update", "revert", "status")),
            flag("folder", "folder of safetensors below engine.weight_roots", nargs="?", default="", metavar="FOLDER"),
            flag("--version", "the name that answers have of them (default: the digest of the files)", default=""),
            switch("--rolling", "change one worker after the other"),
            switch("--json", "print JSON"),
            _WAIT,
            *followed,
        ),
        command("flush", "empty all prefix caches, on every tier", serving, _WAIT, *followed),
        command("pause", "stop all steps at their edge; requests are kept", serving, *followed),
        command("resume", "let paused workers go on", serving, *followed),
        command(
            "sleep",
            "have all workers leave and give their memory back, until wake",
            serving,
            flag("--level", "1: processes keep the weights; 2: nothing is kept", type=int, choices=(1, 2), default=1),
            _WAIT,
            *followed,
        ),
        command("wake", "start the workers of a sleeping cluster again", serving, *followed),
    )
