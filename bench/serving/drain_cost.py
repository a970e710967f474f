"""Drain a decode worker under live streams: what it costs them, and how soon it is empty.

    python -m bench.serving.drain_cost  # 64 streams on 3 decode workers of the demo model
    python -m bench.serving.drain_cost --model DIR --streams 16 --output-tokens 400 --json drain.json
    python -m bench.serving.drain_cost --url http://HOST:PORT --victim decode-1  # a cluster that runs already

The same streams, drawn at random from fixed seeds, run twice. The first time nothing happens. The second time the
victim is drained when each stream has had some tokens; every answer must be the same, token by token. Shown are the
time until the victim had left, the longest gap of each stream that was handed on, beside those of the others, and
the time that waiting for the victim's streams to end would have taken: what they still had to come at that moment, at
the pace of the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, write_report
from bench.common.child_server import serving
from tests.support.drained_streams import bodies_of, compare, run
from twinpool.cli.launch_commands import ClusterFailed
from twinpool.cli.load.openai_client import Endpoint, EndpointError


def table(found: dict[str, Any]) -> Table:
    rows = []
    for name, value in found.items():
        shown = f"{1e3 * value:.1f} ms" if name.endswith("_s") and value < 10 else f"{value:.1f} s"
        rows.append((name.removesuffix("_s").replace("_", " "), shown if name.endswith("_s") else str(value)))
    return figure_table("drain under load", ("what", "value"), rows)


def parser() -> argparse.ArgumentParser:
    out = flag_parser(__doc__, cluster=True)
    out.add_argument("--url", help="a running cluster (default: one is started for this)")
    out.add_argument("--prefill", type=int, default=1, help="prefill workers of the cluster that is started")
    out.add_argument("--decode", type=int, default=3, help="decode workers of the cluster that is started")
    out.add_argument("--victim", default="decode-1", help="who is drained")
    out.add_argument("--streams", type=int, default=64)
    out.add_argument("--input-tokens", default="64:192", help="N or LOW:HIGH")
    out.add_argument("--output-tokens", type=int, default=300)
    out.add_argument("--after-tokens", type=int, default=20, help="tokens that every stream has had at the drain")
    out.add_argument("--seed", type=int, default=1)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(arguments), Console()
    if not 0 < args.after_tokens < args.output_tokens or args.streams < 1 or args.decode < 2:
        console.print("error: give streams, more output tokens than --after-tokens, and two decode workers or more")
        return 2
    try:
        with ExitStack() as stack:
            flags = ["--prefill", str(args.prefill), "--decode", str(args.decode)]
            url = args.url or stack.enter_context(serving(args.model, args.set, flags))
            endpoint = Endpoint.parse(url)
            bodies = bodies_of(args, asyncio.run(endpoint.first_model()))
            calm = asyncio.run(run(endpoint.url, bodies, "", 0))
            if broken := [s.error for s in calm.streams if s.error]:
                raise EndpointError(f"{len(broken)} streams failed before anything was drained: {broken[0]}")
            drained = asyncio.run(run(endpoint.url, bodies, args.victim, args.after_tokens))
    except (EndpointError, ClusterFailed) as error:
        console.print(f"error: {error}")
        return 1
    found = compare(calm, drained)
    console.print(table(found))
    for reason in sorted({s.error for s in drained.streams if s.error}):
        console.print(f"failed: {reason}")
    write_report(args, figures=found)
    return 1 if found["failed"] or found["altered"] else 0


if __name__ == "__main__":
    sys.exit(main())
