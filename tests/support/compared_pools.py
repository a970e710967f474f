"""Clusters of real workers that answer the same requests, with pools that follow the load or of fixed sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table
from bench.common.child_server import serving
from tests.support.phased_replay import Replayed, replay_phases
from twinpool.cli.load.open_loop import Ask
from twinpool.cli.load.openai_client import Outcome
from twinpool.cli.load.replay_figures import is_good, ttft_of, wrongness
from twinpool.sim.scale.cluster_plan import AnswerTarget

TARGET = AnswerTarget(ttft_s=6.0, tpot_s=0.3)
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
