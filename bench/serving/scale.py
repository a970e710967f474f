"""The fast simulator: what an hour of 1,000 workers costs to simulate, and what it says of routing and of scaling.

    python -m bench.serving.scale --part hour
    python -m bench.serving.scale --part routing
    python -m bench.serving.scale --part burst

`hour`: a million requests in the shape of a published trace of chats over a thousand workers. `routing`: each policy
over eight prefill and eight decode workers, under conversations in that shape, `--rates` requests a second;
`cache_aware` also without an index of KV events. `burst`: a thousand workers at most, requests twice as often for a
while; the pools follow, beside fixed sizes. Whether a first token came in time, and the rest, is by `--ttft` and
`--tpot`. The costs of steps are assumed (`sim.fabric.virtual_time.StepCosts`). Seconds are of the processor: who else
runs on the machine doesn't count.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import AnswerTarget, ClusterPlan, DecodePool, PrefillPool
from twinpool.sim.scale.scale_figures import RunReport
from twinpool.sim.scale.traffic import TrafficBurst, TrafficShape, drawn, read_trace, shape_of

TRACE = Path("bench/traces/conversation_200.jsonl")
POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")
WARM_S = 120.0
"""Seconds in which caches fill, whose requests are in no figure of `routing`."""
START_S = 30.0


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    """What one run came to, and what it cost."""

    name: str
    report: RunReport
    cpu_s: float
    rss_mib: float


def measured(
    name: str, plan: ClusterPlan, shape: TrafficShape, *, index: bool = True, since_s: float = 0.0, say_s: float = inf
) -> ScaleFigures:
    """Run one cluster, with a line at its end and after every `say_s` virtual seconds. Raises `RuntimeError` where its
    books don't add up."""
    model, began = ClusterModel(plan, drawn(shape), shape.seed, index=index), time.process_time()
    try:
        spent, sent, until_s = 0.0, 0, say_s
        while not model.over:
            model.run(until_s)
            before, spent = spent, time.process_time() - began
            told = model.report(since_s)
            each = 1e6 * (spent - before) / max(1, told.sent - sent)
            print(
                f"{name}, {'over' if model.over else f'{until_s:,.0f} s'}: {_line(told)}; {each:,.0f} us each",
                flush=True,
            )
            sent = told.sent
            until_s += say_s
        if wrong := model.check():
            raise RuntimeError(f"{name}: {'; '.join(wrong)}")
        return ScaleFigures(name, model.report(since_s), spent, _rss_mib())
    finally:
        model.close()


def _line(told: RunReport) -> str:
    """What a run has come to so far. Good answers are a part of the requests that have ended."""
    good = told.good * told.sent / max(1, told.answered + told.refused + told.failed)
    return (
        f"{told.sent:,} requests, {told.answered:,} answered, {good:.1%} good; TTFT p50 {told.ttft_p50_s:.3f} s, p99 "
        f"{told.ttft_p99_s:.3f} s; {told.hit_rate:.1%} hits; {told.worker_s:,.0f} worker-seconds; {told.reversals} "
        f"reversals; {_rss_mib():,.0f} MiB at most"
    )


def _rss_mib() -> float:
    return getrusage(RUSAGE_SELF).ru_maxrss / 1024


def planned(args: argparse.Namespace, prefill: int, decode: int, **sections: Any) -> ClusterPlan:
    config = {"router": {"max_queue": 100_000, **sections.pop("router", {})}, **sections}
    target = AnswerTarget(args.ttft, args.tpot)
    return ClusterPlan(PrefillPool(prefill), DecodePool(decode), target=target, config=config_from_dict(config))


def hour(args: argparse.Namespace) -> list[ScaleFigures]:
    prefill = round(args.workers * args.prefill_part)
    shape = shape_of(read_trace(TRACE), args.requests, args.seconds, args.seed)
    name = f"{args.workers:,} workers, {args.requests:,} requests"
    return [measured(name, planned(args, prefill, args.workers - prefill), shape, say_s=args.say_every or inf)]


def routing(args: argparse.Namespace) -> list[ScaleFigures]:
    lines, found = read_trace(TRACE), []
    for rate in args.rates:
        seconds = args.routing_seconds + WARM_S
        shape = shape_of(lines, round(rate * seconds), seconds, args.seed, turns=6.0, think_s=30.0)
        for policy, index in [*((policy, True) for policy in args.policies), ("cache_aware", False)]:
            name = f"{rate:g} a second, {policy}{'' if index else ', by what was sent'}"
            plan = planned(args, 8, 8, router={"policy": policy})
            found.append(measured(name, plan, shape, index=index, since_s=WARM_S))
    return found


def burst(args: argparse.Namespace) -> list[ScaleFigures]:
    most, part, third = args.workers, args.prefill_part, args.burst_seconds / 3
    shape = shape_of(
        read_trace(TRACE), args.burst_requests, args.burst_seconds, args.seed, bursts=(TrafficBurst(third, third, 2.0),)
    )
    found = []
    begin = round(most * part / 2), round(most * (1 - part) / 2)
    scaling = {
        "enabled": True, "ttft_target_s": args.ttft, "itl_target_s": args.tpot, "max_workers": most,
        "queue_target_s": args.ttft / 5, "grow_step": args.grow_step, "shrink_step": args.grow_step // 2,
        "shrink_window_s": max(60.0, third / 2), "prefill": {"max_workers": most}, "decode": {"max_workers": most},
    }  # fmt: skip
    plan = planned(args, *begin, autoscaling=scaling)
    plan = replace(plan, places=most, costs=replace(plan.costs, start_s=START_S))
    found.append(measured("follow the load", plan, shape))
    for share in args.fixed:
        sizes = round(most * part * share), round(most * (1 - part) * share)
        found.append(measured(f"{sizes[0]} + {sizes[1]}", planned(args, *sizes), shape))
    return found


def shown(title: str, found: Sequence[ScaleFigures]) -> Table:
    heads = (
        "run", "answered", "hits", "TTFT p50, ms", "p99", "ITL p50", "p99", "good", "good a second", "worker-s",
        "reversals", "CPU, s", "us a request", "MiB",
    )  # fmt: skip
    table = figure_table(title, heads)
    for one in found:
        told = one.report
        table.add_row(
            one.name,
            f"{told.answered:,}",
            f"{told.hit_rate:.1%}",
            *(f"{1000 * s:,.0f}" for s in (told.ttft_p50_s, told.ttft_p99_s)),
            *(f"{1000 * s:,.1f}" for s in (told.itl_p50_s, told.itl_p99_s)),
            f"{told.good:.1%}",
            f"{told.goodput:,.2f}",
            f"{told.worker_s:,.0f}",
            str(told.reversals),
            f"{one.cpu_s:,.0f}",
            f"{1e6 * one.cpu_s / told.sent:,.0f}",
            f"{one.rss_mib:,.0f}",
        )
    return table


PARTS = {"hour": hour, "routing": routing, "burst": burst}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--workers", type=int, default=1000, help="of `hour`; the most of `burst`")
    parser.add_argument("--prefill-part", type=float, default=0.6, help="of the workers")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of `hour`")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of `hour`, virtual")
    parser.add_argument("--say-every", type=float, default=0.0, help="virtual seconds of `hour` between lines; 0: none")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2.0, 3.0, 4.0], help="requests a second of `routing`"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--routing-seconds", type=float, default=600.0, help="virtual, after the caches have filled")
    parser.add_argument("--burst-requests", type=int, default=110_000)
    parser.add_argument("--burst-seconds", type=float, default=600.0, help="virtual; the burst is the middle third")
    parser.add_argument("--grow-step", type=int, default=64, help="autoscaling.grow_step of `burst`")
    parser.add_argument("--fixed", type=float, nargs="*", default=[0.5, 0.75, 1.0], help="sizes, in parts of --workers")
    parser.add_argument("--ttft", type=float, default=5.0, help="seconds to the first token within which it is good")
    parser.add_argument("--tpot", type=float, default=0.1, help="and from token to token")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(headline())
    out: dict[str, object] = {}
    for part, run in PARTS.items():
        if args.part in (part, "all"):
            found = run(args)
            console.print(shown(part, found))
            out[part] = [asdict(one) for one in found]
    write_report(args, **out)
    return 0


if __name__ == "__main__":
    logging.getLogger("twinpool").setLevel(logging.ERROR)  # Of the program, not of who calls `main`.
    sys.exit(main())
