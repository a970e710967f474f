"""Pools that follow the load beside pools of fixed sizes: recorded traffic, replayed with a burst and with a shift.

    python -m bench.autoscaling.modelled_pools
    python -m bench.autoscaling.modelled_pools --part shift
    python -m bench.autoscaling.modelled_pools --quick

The production controller and autoscaler drive the queueing model of `bench/autoscaling/queue_model.py` under a
virtual clock. The requests of the trace come again and again, at `--calm` times their rate, and at `--burst` times it
in the middle; what of a prompt an earlier one of the same round has is not computed.

`burst`: sizes follow within the bounds; beside it every fixed pair of sizes. `shift`: there may be `--together` workers
in all; in the second half prompts have a fifth of their tokens and answers five times as many; beside it every fixed
ratio of as many workers. Figures are of all requests: one that was not answered by the end counts as late.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.autoscaling.queue_model import AutoscalingModel, ModelAsk, ModelCosts, changes
from bench.common import machine
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Role
from twinpool.sim.scale.trace_file import TRACE_BLOCK_TOKENS, TraceLine, read_trace

TRACE = Path("bench/traces/conversation_200.jsonl")
TTFT_S, ITL_S = 5.0, 0.1
SHIFT = 5.0
"""What the shift makes of answers, times their tokens, and of prompts, divided by it."""
COSTS = ModelCosts(compute_per_s=20_000.0, step_s=0.02, step_each_s=0.0005, pages=40_000, page_tokens=16, start_s=30.0)
"""About a model of 8 billion parameters on a card of today: assumed, not measured."""


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """What one run came to."""

    sizes: str
    first_met: float
    """Requests whose first token came in time, of all."""
    gaps_met: float
    worker_s: float
    changes: int
    """How often a pool's number of workers changed."""
    turns: int
    """How often a pool shrank after it had grown, or grew after it had shrunk."""
    role_changes: int = 0

    @property
    def met(self) -> float:
        """The share of the worse of both targets."""
        return min(self.first_met, self.gaps_met)


def replayed(lines: Sequence[TraceLine], phases: Sequence[tuple[float, float, float]]) -> list[ModelAsk]:
    """The trace's requests again and again. A phase: seconds, times the trace's rate, and what answers' tokens are
    multiplied with and prompts' divided by."""
    asks, begin = [], 0.0
    for seconds, rate, mix in phases:
        round_s = lines[-1].at_s / rate
        for number in itertools.count():
            seen: set[int] = set()
            for line in lines:
                at = number * round_s + line.at_s / rate
                known = len(list(itertools.takewhile(seen.__contains__, line.hash_ids)))
                seen.update(line.hash_ids)
                prompt = max(1, line.input_length - known * TRACE_BLOCK_TOKENS)
                if at < seconds:
                    asks.append(ModelAsk(begin + at, max(1, round(prompt / mix)), round(line.output_length * mix)))
            if (number + 1) * round_s >= seconds:
                break
        begin += seconds
    return asks


def configured(most: dict[Role, int], together: int = 0) -> Config:
    section = {
        "enabled": True,
        "ttft_target_s": TTFT_S,
        "itl_target_s": ITL_S,
        "queue_target_s": 2.0,
        "max_workers": together,
        **{str(role): {"max_workers": count} for role, count in most.items()},
    }
    return config_from_dict({"autoscaling": section})


def measure(config: Config, asks: Sequence[ModelAsk], sizes: dict[Role, int], until_s: float) -> ScalingFigures:
    """Run one configuration over all asks."""
    model = AutoscalingModel(config, asks, COSTS, sizes)
    model.run(until_s)
    figures, count = model.figures, len(asks)
    steps = [
        [b - a for a, b in itertools.pairwise(size[1 + which] for size in figures.sizes) if a != b]
        for which in range(len(PAIR))
    ]
    turns = sum((a > 0) != (b > 0) for pool in steps for a, b in itertools.pairwise(pool))
    counters = model.autoscaler.view().counters if model.autoscaler is not None else {}
    return ScalingFigures(
        "follow the load" if model.autoscaler is not None else " + ".join(str(sizes[role]) for role in PAIR),
        sum(seconds <= TTFT_S for seconds in figures.ttft_s) / count,
        1 - figures.gaps_late / figures.gaps if figures.gaps else 0.0,
        figures.worker_s,
        changes(figures.sizes),
        turns,
        counters.get("role_changes", 0),
    )


def compare(
    config: Config,
    asks: Sequence[ModelAsk],
    begin: dict[Role, int],
    fixed: Sequence[tuple[int, int]],
    until_s: float,
) -> tuple[ScalingFigures, list[ScalingFigures]]:
    """The autoscaler's run, and those of fixed sizes."""
    found = measure(config, asks, begin, until_s)
    still = replace(config, autoscaling=replace(config.autoscaling, enabled=False))
    return found, [measure(still, asks, dict(zip(PAIR, pair, strict=True)), until_s) for pair in fixed]


def show(title: str, found: ScalingFigures, others: Sequence[ScalingFigures], console: Console, share: float) -> None:
    """The autoscaler, the best fixed sizes for no more worker-seconds, and the cheapest that meet both targets."""
    table = Table(title=title)
    heads = ("workers", f"first token in {TTFT_S:g} s", f"next in {1000 * ITL_S:g} ms", "worker-s", "changes", "turns")
    for head in heads:
        table.add_column(head, justify="left" if head == "workers" else "right")
    rows = [(found.sizes, found)]
    if cheap := [one for one in others if one.worker_s <= 1.02 * found.worker_s]:
        rows.append(("best fixed for as many worker-s", max(cheap, key=lambda one: (one.met, -one.worker_s))))
    if good := [one for one in others if one.met >= share]:
        rows.append((f"cheapest fixed that meets {share:.0%}", min(good, key=lambda one: one.worker_s)))
    if as_good := [one for one in others if one.met >= found.met]:
        rows.append(("cheapest fixed as good", min(as_good, key=lambda one: one.worker_s)))
    rows.append(("best fixed of all", max(others, key=lambda one: (one.met, -one.worker_s))))
    for name, one in rows:
        shown = name if one is found else f"{name}: {one.sizes}"
        cells = (
            f"{one.first_met:.1%}",
            f"{one.gaps_met:.1%}",
            f"{one.worker_s:,.0f}",
            str(one.changes),
            str(one.turns),
        )
        table.add_row(shown, *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("burst", "shift", "all"), default="all")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument(
        "--seconds", type=float, default=1200.0, help="of the burst, and as long before and twice after"
    )
    parser.add_argument("--calm", type=float, default=0.5, help="times the trace's rate")
    parser.add_argument("--burst", type=float, default=1.5, help="times the trace's rate")
    parser.add_argument("--together", type=int, default=4, help="workers in all of the shift")
    parser.add_argument("--steady", type=float, default=0.7, help="times the trace's rate in the shift")
    parser.add_argument("--quick", action="store_true", help="a short run with few fixed sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(machine.headline())
    lines = read_trace(args.trace)
    seconds = 120.0 if args.quick else args.seconds
    out: dict[str, object] = {"machine": machine.describe()}
    if args.part in ("burst", "all"):
        asks = replayed(lines, [(seconds, args.calm, 1.0), (seconds, args.burst, 1.0), (2 * seconds, args.calm, 1.0)])
        fixed = [(2, 2)] if args.quick else list(itertools.product(range(1, 9), range(1, 6)))
        most = {Role.PREFILL: 10, Role.DECODE: 8}
        config = configured(most)
        found, others = compare(config, asks, {Role.PREFILL: 2, Role.DECODE: 1}, fixed, 4 * seconds)
        show(f"a burst, {len(asks):,} requests", found, others, console, config.autoscaling.attainment)
        out["burst"] = [asdict(one) for one in (found, *others)]
    if args.part in ("shift", "all"):
        total = args.together
        asks = replayed(lines, [(2 * seconds, args.steady, 1.0), (2 * seconds, args.steady, SHIFT)])
        fixed = [(total // 2, total - total // 2)] if args.quick else [(n, total - n) for n in range(1, total)]
        config = configured(dict.fromkeys(PAIR, total - 1), total)
        begin = {Role.PREFILL: total // 2, Role.DECODE: total - total // 2}
        found, others = compare(config, asks, begin, fixed, 4 * seconds)
        show(f"a shift, {len(asks):,} requests", found, others, console, config.autoscaling.attainment)
        console.print(f"changes of roles: {found.role_changes}")
        out["shift"] = [asdict(one) for one in (found, *others)]
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    logging.getLogger("twinpool").setLevel(logging.ERROR)  # Of the program, not of who calls `main`.
    sys.exit(main())
