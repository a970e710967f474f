"""Pools that follow the load, of real workers: a cluster under the client of `twinpool replay`, beside fixed sizes.

    python -m bench.autoscaling.real_pools
    python -m bench.autoscaling.real_pools --part shift --json shift.json
    python -m bench.autoscaling.real_pools --quick

Each run is a cluster of its own of the demo model, with processes that start, compute, drain and migrate. A step sleeps
for `faults.step_delay_s`, so a prefill worker computes `prefill.chunk_tokens` and a decode worker a token of each of
its requests in about that time, and it is a worker's rate that is short, not this machine's cores. The autoscaler's
windows are shorter than as configured, as the phases are.

`burst`: the trace again and again, at `--calm` times its rate, at `--burst` times in the middle third, and calm again.
Its times are rounded to 3 s, so who comes at one is spread until the next. Sizes follow between 1 and `--most` workers
of each role; beside it `--fixed` sizes. `shift`: `--together` workers in all; in the second half prompts have a fourth
of their tokens and answers four times as many; beside it every fixed ratio of as many workers. Every run has the same
requests, and their answers must be the same tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common.bench_report import flag_parser, headline, write_report
from tests.support.compared_pools import SCALING, WORKERS, ClusterFigures, Comparison, bounds, compare
from tests.support.phased_replay import Lengths, Phase, asks_in_phases, spread
from twinpool.cli.launch_commands import ClusterFailed
from twinpool.cli.load.openai_client import EndpointError
from twinpool.sim.scale.traffic import read_trace

TRACE = Path("bench/traces/conversation_200.jsonl")
SHIFT = 4.0
"""What the shift makes of answers, times their tokens, and of prompts, divided by it."""


def pairs(text: str) -> list[tuple[int, int]]:
    """``1+1,2+2`` as sizes."""
    try:
        found = [(int(a), int(b)) for a, _, b in (one.partition("+") for one in text.split(",") if one)]
    except ValueError:
        found = [(0, 0)]
    if not found or any(min(pair) < 1 for pair in found):
        raise argparse.ArgumentTypeError(f"sizes are PREFILL+DECODE with commas between them, got {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    out = flag_parser(__doc__)
    out.add_argument("--part", choices=("burst", "shift", "all"), default="all")
    out.add_argument("--trace", type=Path, default=TRACE)
    out.add_argument("--groups", action="store_true", help="requests of one time all at once, as the trace has them")
    out.add_argument("--seconds", type=float, default=240.0, help="of a run")
    out.add_argument("--calm", type=float, default=0.2, help="times the trace's rate")
    out.add_argument("--burst", type=float, default=1.0, help="times the trace's rate")
    out.add_argument("--steady", type=float, default=0.8, help="times the trace's rate in the shift")
    out.add_argument("--most", type=int, default=3, help="workers of each role under the burst")
    out.add_argument("--together", type=int, default=4, help="workers in all of the shift")
    out.add_argument("--fixed", type=pairs, default=pairs("1+1,2+2,3+3"), help="sizes beside the burst")
    out.add_argument("--quick", action="store_true", help="a short run beside one fixed size, to see that it runs")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(arguments), Console(width=None if sys.stdout.isatty() else 120)
    if not (args.seconds > 0 and min(args.calm, args.burst, args.steady) > 0 and args.most > 0 and args.together > 1):
        console.print("error: seconds and rates are above 0, --most is 1 or more and --together 2 or more")
        return 2
    console.print(headline())
    seconds = 30.0 if args.quick else args.seconds
    out: dict[str, Any] = {"cluster": [*WORKERS, *SCALING]}
    well = True
    try:
        lines = read_trace(args.trace)
        if not args.groups:
            lines = spread(lines)
        for part in ("burst", "shift") if args.part == "all" else (args.part,):
            if part == "burst":
                phases = [Phase(seconds / 3, rate) for rate in (args.calm, args.burst, args.calm)]
                begin, scaling = (1, 1), bounds(args.most)
                fixed = args.fixed[:1] if args.quick else args.fixed
            else:
                phases = [Phase(seconds / 2, args.steady, mix) for mix in (1.0, SHIFT)]
                total = args.together
                begin, scaling = (total // 2, total - total // 2), bounds(total - 1, total)
                fixed = [begin] if args.quick else [(count, total - count) for count in range(1, total)]
            asks = asks_in_phases(lines, phases, Lengths())
            plan = Comparison(f"a {part}", asks, seconds, begin, scaling, fixed)

            def save(found: list[ClusterFigures], part: str = part) -> None:
                out[part] = [asdict(one) for one in found]
                write_report(args, **out)

            well = compare(plan, console, save) and well
    except (ClusterFailed, EndpointError, OSError, ValueError) as error:
        console.print(f"error: {error}")
        return 1
    return 0 if well else 1


if __name__ == "__main__":
    logging.getLogger("twinpool").setLevel(logging.ERROR)  # Of the program, not of who calls `main`.
    sys.exit(main())
