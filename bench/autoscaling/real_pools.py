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
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.common.child_server import serving
from tests.support.phased_replay import Lengths, Phase, Replayed, asks_in_phases, replay_phases, spread
from twinpool.cli.own_cluster import ClusterFailed
from twinpool.cli.replay.openai_client import EndpointError, Outcome
from twinpool.cli.replay.replay_figures import is_good, ttft_of, wrongness
from twinpool.cli.replay.trace_prompts import Ask
from twinpool.sim.scale.cluster_plan import LatencyTarget
from twinpool.sim.scale.traffic import read_trace

TRACE = Path("bench/traces/conversation_200.jsonl")
SHIFT = 4.0
"""What the shift makes of answers, times their tokens, and of prompts, divided by it."""
TARGET = LatencyTarget(ttft_s=6.0, tpot_s=0.3)
WORKERS = (
    "engine.threads=1", "cache.page_tokens=16", "prefill.chunk_tokens=32", "prefill.cache.device_tokens=8192",
    "decode.cache.device_tokens=2048", "decode.speculation=off", "faults.step_delay_s=0.1",
)  # fmt: skip
"""A prefill worker computes about 300 tokens/s, a decode worker has 128 pages."""
SCALING = (
    "autoscaling.enabled=true", f"autoscaling.ttft_target_s={TARGET.ttft_s}",
    f"autoscaling.itl_target_s={TARGET.tpot_s}", "autoscaling.queue_target_s=3", "autoscaling.period_s=2",
    "autoscaling.window_s=15", "autoscaling.shrink_window_s=40", "autoscaling.grow_cooldown_s=6",
    "autoscaling.shrink_cooldown_s=10", "autoscaling.role_window_s=30", "autoscaling.role_cooldown_s=60",
)  # fmt: skip
FOLLOW = "follow the load"


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What one run came to. Shares are of all requests, or of all later tokens."""

    workers: str
    asked: int
    failed: dict[str, int]
    """Requests without a whole answer, or with counts that aren't what was asked for, by what was wrong."""
    first_met: float
    gaps_met: float
    goodput: float
    """Answers a second that kept both targets."""
    worker_s: float
    grown: int
    shrunk: int
    role_changes: int
    turns: tuple[float, ...]
    """Seconds between two changes of which one undid the other's direction."""
    drained_s: float
    """Seconds of the longest drain."""
    died: tuple[str, ...]
    load: float
    """The machine's mean load."""
    sizes: tuple[tuple[float, int, int], ...]
    decisions: tuple[tuple[float, str], ...]

    @property
    def met(self) -> float:
        """The share of the worse of both targets."""
        return min(self.first_met, self.gaps_met)


def figures_of(workers: str, run: Replayed, seconds: float) -> ClusterFigures:
    """The figures of a run whose phases were so long."""
    outcomes, watch = run.outcomes, run.watch
    failed: dict[str, int] = {}
    for outcome in outcomes:
        if wrong := outcome.error or wrongness(outcome, counts_prompts=True, exact=True):
            failed[wrong] = failed.get(wrong, 0) + 1
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    return ClusterFigures(
        workers=workers,
        asked=len(outcomes),
        failed=failed,
        first_met=sum(bool(o.arrivals_s) and ttft_of(o) <= TARGET.ttft_s for o in outcomes) / len(outcomes),
        gaps_met=sum(gap <= TARGET.tpot_s for gap in gaps) / len(gaps) if gaps else 0.0,
        goodput=sum(is_good(outcome, TARGET) for outcome in outcomes) / seconds,
        worker_s=watch.worker_s,
        grown=watch.counters.get("grown", 0),
        shrunk=watch.counters.get("shrunk", 0),
        role_changes=watch.counters.get("role_changes", 0),
        turns=tuple(watch.turns()),
        drained_s=max(watch.drain_s.values(), default=0.0),
        died=tuple(sorted(watch.ends)),
        load=run.load,
        sizes=tuple(watch.sizes),
        decisions=tuple(watch.decisions),
    )


def unlike(first: Sequence[Outcome], other: Sequence[Outcome]) -> int:
    """How many requests two runs answered with different tokens."""
    whole = ((a, b) for a, b in zip(first, other, strict=True) if a.ok and b.ok)
    return sum(a.token_ids != b.token_ids or not a.token_ids for a, b in whole)


def bounds(most: int, together: int = 0) -> tuple[str, ...]:
    each = tuple(f"autoscaling.{role}.max_workers={most}" for role in ("prefill", "decode"))
    return (*SCALING, *each, f"autoscaling.max_workers={together}")


def run_on(asks: Sequence[Ask], seconds: float, sizes: tuple[int, int], scaling: Sequence[str] = ()) -> Replayed:
    """A run on a cluster of its own that begins with so many workers. Raises `ClusterFailed` and `EndpointError`."""
    flags = ["--prefill", str(sizes[0]), "--decode", str(sizes[1])]
    with serving("demo", (*WORKERS, *scaling), flags) as url:
        return asyncio.run(replay_phases(url, asks, seconds))


def table(title: str, figures: Sequence[ClusterFigures]) -> Table:
    heads = (
        "workers", f"first in {TARGET.ttft_s:g} s", f"next in {1000 * TARGET.tpot_s:g} ms", "good/s", "worker-s",
        "grown", "shrunk", "roles", "turns", "failed", "load",
    )  # fmt: skip
    out = figure_table(title, heads)
    for one in figures:
        met = f"{one.first_met:.1%}", f"{one.gaps_met:.1%}", f"{one.goodput:.2f}", f"{one.worker_s:,.0f}"
        counts = one.grown, one.shrunk, one.role_changes, len(one.turns), sum(one.failed.values())
        out.add_row(one.workers, *met, *map(str, counts), f"{one.load:.1f}")
    return out


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is run: the same asks of a cluster whose pools follow the load, and of some of fixed sizes."""

    title: str
    asks: list[Ask]
    seconds: float
    begin: tuple[int, int]
    scaling: tuple[str, ...]
    fixed: list[tuple[int, int]]


def compare(plan: Comparison, console: Console, save: Callable[[list[ClusterFigures]], None]) -> bool:
    """The autoscaler's run, then those of fixed sizes; figures are saved and shown after each. Returns whether all went
    well: every answer came, and was the same tokens. Raises `ClusterFailed` and `EndpointError`."""
    first: Replayed | None = None
    found, different = list[ClusterFigures](), 0
    for sizes in (None, *plan.fixed):
        run = run_on(plan.asks, plan.seconds, sizes or plan.begin, () if sizes else plan.scaling)
        found.append(figures_of(f"{sizes[0]} + {sizes[1]}" if sizes else FOLLOW, run, plan.seconds))
        save(found)
        first = first or run
        different += unlike(first.outcomes, run.outcomes)
        console.print(table(f"{plan.title}, {len(plan.asks):,} requests in {plan.seconds:g} s", found))
        if sizes is None:
            tell(found[0], console)
    console.print(f"answers with other tokens than the first run's: {different}")
    for one in found:
        if one.failed or one.died:
            console.print(f"{one.workers}: {one.failed} {', '.join(one.died)}")
    return not different and not any(one.failed or one.died for one in found)


def tell(found: ClusterFigures, console: Console) -> None:
    """What the autoscaler did."""
    for at, text in found.decisions:
        console.print(f"{at:6.1f} s  {text}")
    console.print("ready:", ", ".join(f"{at:.0f} s {p}+{d}" for at, p, d in found.sizes))
    turns = ", ".join(f"{seconds:.0f} s" for seconds in found.turns)
    console.print(f"turned after: {turns or 'never'}; the longest drain: {found.drained_s:.1f} s")


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
