"""What `twinpool status` and `twinpool check` show: a cluster's first line, its workers, and what they are waiting for.

Rows that are alike are one row with their number where a table would be long. How a worker's process ended once is said
of one that is gone or starts again; one that serves is well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.cli.admin_client import WATCH_S, AdminClient, ChosenCluster, RouterAway, client_for, duration
from twinpool.cli.command_parser import FINE, REFUSED, console, plain_table, print_line, print_table

SHOWN_DECISIONS = 5
"""The autoscaler's latest decisions that `status` shows."""
LONG_TABLE = 12
"""Rows from which on a table has alike ones folded."""
FOLDED_FROM = 3
"""Alike rows that become one."""
_COLOURS = {"ready": "green", "starting": "cyan", "draining": "yellow", "left": "dim", "dead": "red"}
_BREAKERS = {
    "open": "gets no requests for now: too many have failed there",
    "half-open": "gets one request to see whether it works again",
}
"""A router's circuit breaker for a worker, in words; that of one that is gone says nothing."""
GONE = ("left", "dead")
Row = Mapping[str, Any]


def status_view(status: Mapping[str, Any], *, up_s: float | None = None, unfold: bool = False) -> Any:
    """Return what `twinpool status` shows: the cluster's line, the workers, the controllers, and the autoscaler where
    there is one. `up_s`: seconds since the cluster was started, None where that isn't known here. `unfold`: a row for
    each worker."""
    from rich.console import Group
    from rich.text import Text

    from twinpool.cli.operator.cluster_rows import router_lines

    parts = [Text(cluster_line(status, up_s))] if "url" in status else []
    parts.append(status_table(status["workers"], unfold=unfold))
    if not unfold and len(folded(status["workers"])) < len(status["workers"]):
        parts.append(Text(f"{len(status['workers'])} workers; alike ones share a row: --all shows each"))
    parts += builds_view(status["workers"])
    parts += map(Text, router_lines(status.get("routers", ())))
    if "controllers" in status:
        parts.append(Text(controllers_line(status["controllers"])))
    if "autoscaler" in status:
        parts.append(autoscaler_view(status["autoscaler"]))
    return Group(*parts)


def numerics_lines(workers: Sequence[Row]) -> list[str]:
    """Return a line for each numerics class with the workers of it, for `status --verbose`."""
    classes: dict[str, list[str]] = {}
    for row in workers:
        if row.get("fingerprint") and row["state"] not in GONE:
            classes.setdefault(row["fingerprint"]["numerics"], []).append(row["name"])
    return [f"numerics of {', '.join(names)}: {numerics}" for numerics, names in classes.items()]


def cluster_line(status: Mapping[str, Any], up_s: float | None = None) -> str:
    """Return a cluster's URL, model, time, rate and load in a line, of what is known."""
    parts = [status["url"]]
    if "model" in status:
        parts.append(f"model {status['model']}")
    if up_s is not None:
        parts.append(f"up {duration(up_s)}")
    elif "router_up_s" in status:
        parts.append(f"this router up {duration(status['router_up_s'])}")
    if "tokens_per_s" in status:
        parts.append(f"{status['tokens_per_s']:,.0f} tokens a second")
    if "in_flight" in status:
        waiting = status.get("waiting", 0)
        running = status["in_flight"] - waiting
        parts.append(f"{running} request{'s' * (running != 1)} running" + f", {waiting} waiting" * bool(waiting))
    return ", ".join(parts)


def status_table(workers: Sequence[Row], *, unfold: bool = True) -> Any:
    """Return a rich table of the workers; without `unfold` alike rows of a long one are a row with their number."""
    table = plain_table(
        "worker", "state", "node", "pid", "start", "running", "waiting", "pages free", "pages", "plane", "settings"
    )
    for alike in [[row] for row in workers] if unfold else folded(workers):
        w = alike[0]
        colour = _COLOURS.get(w["state"], "default")
        state = ", ".join([w["state"], *_troubles(w)])
        starts = sorted({row["incarnation"] for row in alike})
        cells = [
            _nodes_of(w),
            w["pid"] if w["pid"] and len(alike) == 1 and w["state"] not in GONE else "",
            starts[0] if len(starts) == 1 else f"{starts[0]}-{starts[-1]}",
            w["running"],
            w["waiting"],
            w["pages_free"],
            w["pages_total"],
            w.get("plane") or "-",
            w.get("settings") or "-",
        ]
        table.add_row(names_of(alike), f"[{colour}]{state}[/]", *(str(cell) for cell in cells))
    return table


def _nodes_of(row: Row) -> str:
    """The node of a worker, or the nodes of its ranks, that of rank 0 first."""
    return ", ".join(dict.fromkeys([row["node"], *(node for node, _ in row.get("rank_nodes") or ())]))


def folded(workers: Sequence[Row]) -> list[list[Row]]:
    """Return the workers in groups of alike ones, in the order of each one's first; those of a small group, or of a
    short table, are alone."""
    if len(workers) <= LONG_TABLE:
        return [[row] for row in workers]
    groups: dict[object, list[Row]] = {}
    for w in workers:
        shown = tuple(str(w.get(key)) for key in ("role", "state", "running", "waiting", "pages_free", "pages_total"))
        alike = (*shown, _nodes_of(w), *_troubles(w), w.get("plane"), w.get("settings"), w.get("cordoned"))
        groups.setdefault(alike, []).append(w)
    return [
        part for rows in groups.values() for part in ([rows] if len(rows) >= FOLDED_FROM else [[row] for row in rows])
    ]


def names_of(workers: Sequence[Row]) -> str:
    """Return the names of alike workers in short: the first, the last, and how many they are."""
    if len(workers) == 1:
        return str(workers[0]["name"])
    return f"{workers[0]['name']} to {workers[-1]['name']}: {len(workers)}"


def _troubles(row: Row) -> list[str]:
    """Return what an operator should know of a worker besides its state, in words."""
    found, gone = [], row["state"] in GONE
    if row.get("waits"):
        found.append(f"waits for {row['waits']}")
    if row.get("stalled_s") and not gone:
        found.append(f"no progress for {row['stalled_s']:.0f} s")
    if row.get("unlinked") and not gone:
        found.append(f"the router has no link to it: {row['unlinked']}")
    if row.get("last_end") and row["state"] == "dead":
        found.append(f"its process ended: {ended(row['last_end'])}")
    elif row.get("last_end") and row["state"] == "starting":
        found.append(f"again, as the one before ended: {ended(row['last_end'])}")
    if row.get("breaker") in _BREAKERS and not gone:
        found.append(_BREAKERS[row["breaker"]])
    if (retracted := (row.get("counters") or {}).get("retracted")) and not gone:
        found.append(f"{retracted:.0f} retracted")
    return found


def ended(reason: str) -> str:
    """Return the reason of a process's end, with signals by what they mean."""
    return reason.replace("killed, signal 9", "killed (SIGKILL, as where memory is short)")


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


def check_line(report: Mapping[str, Any]) -> str:
    """Return a check's verdict in a line."""
    workers = [worker for worker in report["workers"] if worker["name"] != "router"]
    many = f"{len(workers)} worker{'s' * (len(workers) != 1)}"
    if report["ok"]:
        return (
            f"all accounted for: {many} and the router recounted everything, and it is what their books say. Below is "
            "how much each recounted; any number is normal"
        )
    bad = [worker["name"] for worker in report["workers"] if worker["violations"]]
    count = sum(len(worker["violations"]) for worker in report["workers"])
    return f"violations found: {count}, of {', '.join(bad)}; none is normal: each is named below the table"


def check_table(report: Mapping[str, Any]) -> Any:
    """Return a rich table of a check: the result and the numbers of what was recounted, for each worker."""
    table = plain_table("worker", "result", "pages", "slots", "leases", "rooms")
    for worker in report["workers"]:
        bad = len(worker["violations"])
        result = f"[red]{bad} violation{'s' if bad > 1 else ''}[/]" if bad else "[green]whole[/]"
        counts = [str(worker["checked"][key]) for key in ("pages", "slots", "leases", "rooms")]
        table.add_row(worker["name"], result, *counts)
    return table


def status(args: argparse.Namespace) -> int:
    said: list[str] = []  # The view has a line of its own for the cluster.
    operator, chosen = client_for(args.url, args.ca, args.model_name, changes=False, say=said.append)
    if args.json or chosen.several:
        print(chosen.line, file=sys.stderr, flush=True)
    if args.watch:
        return _watch(operator, chosen, args)
    status = operator.status()
    if args.json:
        print(json.dumps(status))
        return FINE
    print_table(_status_view(status, chosen, args))
    if args.verbose:
        for line in (*numerics_lines(status["workers"]), *chosen.start_report()):
            print_line(line)
    return FINE


def _status_view(status: dict[str, Any], chosen: ChosenCluster, args: argparse.Namespace) -> Any:
    return status_view(status, up_s=chosen.up_s, unfold=args.all)


def _watch(operator: AdminClient, chosen: ChosenCluster, args: argparse.Namespace) -> int:
    """Show the workers again and again until Ctrl-C, which ends in order; a router that is away is waited for."""
    from rich.live import Live

    out, as_json = console(), args.json
    with Live(console=out, auto_refresh=False) as live:
        while True:
            try:
                status = operator.status()
            except RouterAway as error:
                shown: Any = str(error)
            else:
                shown = json.dumps(status) if as_json else _status_view(status, chosen, args)
            if as_json or not sys.stdout.isatty():
                out.print(shown, soft_wrap=as_json)
            else:
                live.update(shown, refresh=True)
            operator.sleep(WATCH_S)


def check(args: argparse.Namespace) -> int:
    report = client_for(args.url, args.ca, args.model_name, changes=False)[0].check()
    if args.json:
        print(json.dumps(report))
    else:
        print_line(check_line(report))
        print_table(check_table(report))
        for worker in report["workers"]:
            for violation in worker["violations"]:
                print(f"{worker['name']}: {violation}")
    return FINE if report["ok"] else REFUSED
