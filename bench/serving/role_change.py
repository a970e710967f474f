"""Change a worker's role while nothing runs, and restart it: how long it is out of service each time.

    python -m bench.serving.role_change                      # the demo model
    python -m bench.serving.role_change --model DIR --changes 6 --json role.json

A worker that changes its role keeps its process and its weights; one that is restarted gets a new process, which loads
them: that is how a role was changed before. Shown are the seconds from the last look at which the worker was of the
incarnation before until the first at which the next one is ready. Looks are `--look` apart, at the router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.common.bench_cluster import serving
from twinpool.cli.own_cluster import ClusterFailed

WORKER = "decode-1"
TIMEOUT_S = 300.0


class ChangeFailed(Exception):
    """Raised when a change is refused, or takes too long."""


async def row_of(client: httpx.AsyncClient) -> dict[str, Any]:
    rows = (await client.get("/cluster/status")).json()["workers"]
    found: dict[str, Any] = next(row for row in rows if row["name"] == WORKER)
    return found


async def away(client: httpx.AsyncClient, order: str, look_s: float) -> tuple[float, bool]:
    """Give an order about the worker; returns how many seconds it was out of service, and whether its process went on.

    Raises `ChangeFailed`.
    """
    before = await row_of(client)
    answer = await client.post(order)
    if answer.status_code != 200:
        raise ChangeFailed(f"{order}: {answer.text[:200]}")
    last = began = time.perf_counter()
    while True:
        row, now = await row_of(client), time.perf_counter()
        if row["incarnation"] == before["incarnation"] and row["state"] in ("ready", "draining"):
            last = now
        elif row["incarnation"] > before["incarnation"] and row["state"] == "ready":
            return now - last, row["pid"] == before["pid"]
        if now - began > TIMEOUT_S:
            raise ChangeFailed(f"{WORKER} isn't back after {TIMEOUT_S:g} s")
        await asyncio.sleep(look_s)


async def run(url: str, changes: int, look_s: float) -> dict[str, Any]:
    """The figures; times are in seconds. Raises `ChangeFailed`."""
    changed, restarted, kept = list[float](), list[float](), 0
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for number in range(changes):
            role = ("prefill", "decode")[number % 2]
            seconds, went_on = await away(client, f"/cluster/role/{WORKER}?role={role}", look_s)
            changed.append(seconds)
            kept += went_on
        for _ in range(changes):
            seconds, _ = await away(client, f"/cluster/restart/{WORKER}", look_s)
            restarted.append(seconds)
    return {
        "changes": changes,
        "processes_kept": kept,
        "change_p50_s": statistics.median(changed),
        "change_longest_s": max(changed),
        "restart_p50_s": statistics.median(restarted),
        "restart_longest_s": max(restarted),
    }


def table(found: dict[str, Any]) -> Table:
    out = Table("what", "value", title="a worker's change of role, and its restart")
    for name, value in found.items():
        out.add_row(name.replace("_", " ").removesuffix(" s"), f"{value:.2f} s" if name.endswith("_s") else str(value))
    return out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--model", default="demo", help="checkpoint folder, or demo")
    out.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    out.add_argument("--changes", type=int, default=6, help="changes of role, and as many restarts")
    out.add_argument("--look", type=float, default=0.01, metavar="S", help="seconds between two looks")
    out.add_argument("--json", type=Path, help="write settings and figures to this file")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(arguments), Console()
    if args.changes < 1 or args.look <= 0:
        console.print("error: give one change or more, and a time between two looks")
        return 2
    try:
        with serving(args.model, args.set, ["--prefill", "1", "--decode", "2"]) as url:
            found = asyncio.run(run(url, args.changes, args.look))
    except (ChangeFailed, ClusterFailed, httpx.HTTPError) as error:
        console.print(f"error: {error}")
        return 1
    console.print(table(found))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        text = json.dumps({"settings": settings, "figures": found}, indent=2, default=str)
        args.json.write_text(text + "\n")
    return 0 if found["processes_kept"] == found["changes"] else 1


if __name__ == "__main__":
    sys.exit(main())
