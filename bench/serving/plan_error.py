"""How far plans are from real runs: costs are measured on a cluster, loads are predicted by them and then replayed.

    python -m bench.serving.plan_error
    python -m bench.serving.plan_error --set faults.step_delay_s=0.2 --set decode.speculation=off \
        --scale-lengths 0.03125 --requests 100 --speeds 0.5 1 1.25 --slo ttft=2,itl=0.3

The second makes each step of both workers take 0.2 s longer, so that a machine that is busy with other things is little
of what is measured: what is compared then is who waits for what, in real queues, batches and hand-overs.

One cluster of one worker of each role serves throughout. It is calibrated as `twinpool plan --measure` does, then the
first requests of a trace are replayed at several speeds, each with prompts that no cache has, and simulated with the
same lengths, arrivals and shared prefixes. The table has both and how far the prediction is off. A machine that does
other things as well changes between the calibration and the runs, which is an error, too: its load is told with each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.common import machine
from twinpool.cli.latency_target import read_target
from twinpool.cli.own_cluster import own_cluster
from twinpool.cli.plan.measure_costs import CostSource, measure_costs
from twinpool.cli.plan.plan_command import PlannedLoad
from twinpool.cli.replay.openai_client import Endpoint
from twinpool.cli.replay.replay_command import ReplayOptions, ReplayRun
from twinpool.cli.replay.replay_figures import ReplayFigures
from twinpool.sim.scale.cost_file import MeasuredCosts
from twinpool.sim.scale.scale_figures import RunReport
from twinpool.sim.scale.trace_file import read_trace

TRACE = Path("bench/traces/conversation_200.jsonl")
SCALE, CONTEXT = 1 / 16, 2000


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """One load, predicted and run."""

    speed: float
    predicted: RunReport
    measured: ReplayFigures
    machine_load: float
    """Processes that wanted a core, a minute's average, at the run's end."""

    def pairs(self) -> dict[str, tuple[float, float]]:
        """What is compared: predicted, measured."""
        told, seen = self.predicted, self.measured
        return {
            "hits, %": (100 * told.hit_rate, 100 * seen.cached_share),
            "TTFT p50, ms": (1e3 * told.ttft_p50_s, 1e3 * seen.ttft.p50),
            "TTFT p99, ms": (1e3 * told.ttft_p99_s, 1e3 * seen.ttft.p99),
            "TTFT mean, ms": (1e3 * told.ttft_mean_s, 1e3 * seen.ttft.mean),
            "ITL p50, ms": (1e3 * told.itl_p50_s, 1e3 * seen.itl.p50),
            "ITL p99, ms": (1e3 * told.itl_p99_s, 1e3 * seen.itl.p99),
            "TPOT p50, ms": (1e3 * told.tpot_p50_s, 1e3 * seen.tpot.p50),
            "answer p50, ms": (1e3 * told.answer_p50_s, 1e3 * seen.answer.p50),
            "good, %": (100 * told.good, 100 * seen.good / max(1, seen.sent)),
        }


def compare(url: str, costs: MeasuredCosts, args: argparse.Namespace, speed: float, seed: int) -> LoadComparison:
    """Predict a load, then run it."""
    target = read_target(args.slo)
    lines = read_trace(args.trace, args.requests)
    load = PlannedLoad(lines, target, speed, args.scale_lengths, CONTEXT, answer_limit=2)
    predicted = load.predict(costs, 1, 1).report
    options = ReplayOptions(
        args.trace,
        url,
        target,
        speed=speed,
        limit=args.requests,
        scale_lengths=args.scale_lengths,
        max_context=CONTEXT,
        seed=seed,
    )

    async def run() -> ReplayFigures:
        endpoint = Endpoint.parse(url)
        replay = ReplayRun(options, [endpoint], await endpoint.first_model(), 1.0)
        await replay.run()
        return replay.figures()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(run())
    return LoadComparison(speed, predicted, measured, os.getloadavg()[0])


def table(comparisons: Sequence[LoadComparison]) -> Table:
    out = Table(pad_edge=False)
    for column in ("speed", "", "predicted", "measured", "off by"):
        out.add_column(column, justify="right" if column else "left")
    for one in comparisons:
        for label, (told, seen) in one.pairs().items():
            off = f"{told / seen - 1:+.0%}" if seen else "-"
            out.add_row(f"{one.speed:g}", label, f"{told:,.1f}", f"{seen:,.1f}", off)
        sent = one.measured.sent
        notes = f"{one.measured.answered} of {sent} answered, machine load {one.machine_load:.1f}"
        out.add_row(f"{one.speed:g}", notes, "", "", "", end_section=True)
    return out


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", default="demo")
    flags.add_argument("--trace", type=Path, default=TRACE)
    flags.add_argument("--requests", type=int, default=200)
    flags.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    flags.add_argument("--scale-lengths", type=float, default=SCALE)
    flags.add_argument("--slo", default="ttft=1.0,itl=0.05")
    flags.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--json", type=Path)
    args = flags.parse_args(argv)
    say = Console(stderr=True).print
    source = CostSource(model=args.model, assignments=tuple(args.set))
    with own_cluster(source.serve_flags()) as url:
        costs = measure_costs(CostSource(url, assignments=tuple(args.set)), say)
        comparisons = [compare(url, costs, args, speed, args.seed + n) for n, speed in enumerate(args.speeds)]
    Console().print(table(comparisons))
    print(
        f"costs: first tokens explained to {costs.prompt_error:.1%}, batches to {costs.batch_error:.1%}; "
        f"{machine.headline()}"
    )
    if args.json is not None:
        out: dict[str, Any] = {"costs": asdict(costs), "loads": [asdict(one) for one in comparisons]}
        args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.measured.clean for one in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
