"""Serve with weights that the workers of the node share and with weights of each worker's own, in turn.

    python -m bench.serving.shared_weights                     # the demo model
    python -m bench.serving.shared_weights --model DIR --rounds 2 --json shared.json

Shown for each: seconds until the cluster is ready; seconds that a worker is out of service when it is restarted; the
memory of all workers, in which what several have mapped counts once (proportional set size); and tokens a second of one
answer, which says whether mapped weights are read as fast. Ratios are own to shared.
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

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.common.bench_cluster import serving
from bench.serving.role_change import TIMEOUT_S, WORKER, ChangeFailed, away
from twinpool.cli.own_cluster import ClusterFailed

LOOK_S = 0.01
WAYS = {"own": "off", "shared": "auto"}
"""Of `engine.share_weights`, by what is shown."""


async def measured(url: str, restarts: int, tokens: int) -> dict[str, float]:
    """The figures of a cluster that runs. Raises `ChangeFailed`."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": "It was", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        speeds = []
        for _ in range(3):
            begun = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            speeds.append(tokens / (time.perf_counter() - begun))
        rows = (await client.get("/cluster/status")).json()["workers"]
        memory = sum(psutil.Process(row["pid"]).memory_full_info().pss for row in rows)
        away_s = [(await away(client, f"/cluster/restart/{WORKER}", LOOK_S))[0] for _ in range(restarts)]
    return {"memory_mib": memory / 2**20, "restart_s": statistics.median(away_s), "tokens_per_s": max(speeds)}


def run(model: str, settings: Sequence[str], rounds: int, restarts: int, tokens: int) -> dict[str, dict[str, float]]:
    """The medians of all rounds, by way. Raises `ChangeFailed`, `ClusterFailed` and `httpx.HTTPError`."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, value in WAYS.items():
            begun = time.perf_counter()
            every = [*settings, f"engine.share_weights={value}"]
            with serving(model, every, ["--prefill", "1", "--decode", "2"]) as url:
                ready_s = time.perf_counter() - begun
                found[way].append({"ready_s": ready_s, **asyncio.run(measured(url, restarts, tokens))})
    return {
        way: {name: statistics.median(one[name] for one in every) for name in every[0]} for way, every in found.items()
    }


def table(found: dict[str, dict[str, float]]) -> Table:
    out = Table("what", *WAYS, "own / shared", title="weights of each worker's own, and shared by the node")
    for name, own in found["own"].items():
        shared = found["shared"][name]
        out.add_row(name.replace("_", " "), f"{own:.2f}", f"{shared:.2f}", f"{own / shared:.2f}")
    return out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--model", default="demo", help="checkpoint folder, or demo")
    out.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    out.add_argument("--rounds", type=int, default=2, help="clusters of each kind, in turn")
    out.add_argument("--restarts", type=int, default=3, help="restarts in each")
    out.add_argument("--tokens", type=int, default=64, help="of the answer that is timed")
    out.add_argument("--json", type=Path, help="write settings and figures to this file")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(arguments), Console()
    if min(args.rounds, args.restarts, args.tokens) < 1:
        console.print("error: give one round, restart and token or more")
        return 2
    try:
        found = run(args.model, args.set, args.rounds, args.restarts, args.tokens)
    except (ChangeFailed, ClusterFailed, httpx.HTTPError, psutil.Error) as error:
        console.print(f"error: {error}")
        return 1
    console.print(table(found))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"settings": settings, "figures": found}, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
