"""The command `twinpool plan`: what it is asked, its steps, and what it shows: the pools that were looked at, what they
would come to, and why one was chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.cli.load.measure_costs import CostSource, measure_costs
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.cluster_plan import AnswerTarget, ClusterPlan, MeasuredCosts, read_costs
from twinpool.sim.scale.scale_command import PoolPrediction, PoolSearch
from twinpool.sim.scale.traffic import TraceLine, read_trace, replayed, scaled_block

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_QUEUED = 1_000_000
"""`router.max_queue` of simulated routers: what waits is late, and isn't refused."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load, and what is wanted of it."""

    lines: Sequence[TraceLine]
    target: AnswerTarget
    speed: float = 1.0
    scale_lengths: float = 1.0
    max_context: int | None = None
    answer_limit: int = 2048
    """Tokens that an answer may have, as far as workers know before it has ended."""
    policy: str = "cache_aware"

    def predict(self, costs: MeasuredCosts, prefill: int, decode: int) -> PoolPrediction:
        """Simulate the load on so many workers."""
        config = config_from_dict({
            "router": {"policy": self.policy, "max_queue": MAX_QUEUED},
            "cache": {"page_tokens": costs.page_tokens},
        })  # fmt: skip
        plan = ClusterPlan(
            costs.prefill_pool(prefill), costs.decode_pool(decode), costs.costs, self.target,
            block_tokens=scaled_block(self.scale_lengths), config=config,
        )  # fmt: skip
        requests = replayed(
            self.lines, speed=self.speed, answer_limit=self.answer_limit, scale=self.scale_lengths,
            max_context=self.max_context,
        )  # fmt: skip
        model = ClusterModel(plan, requests)
        try:
            model.run()
            return PoolPrediction(prefill, decode, model.report(), model.decode_peak)
        finally:
            model.close()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line says."""

    trace: Path | None
    target: AnswerTarget
    share: float
    costs: Path
    source: CostSource | None
    """What is measured first; None: nothing."""
    speed: float = 1.0
    limit: int | None = None
    scale_lengths: float = 1.0
    max_context: int | None = None
    max_workers: int = 64
    policy: str = "cache_aware"
    json: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> PlanOptions:
        """Check the flags. Raises `ConfigError`."""
        for name in ("speed", "limit", "scale_lengths", "max_workers"):
            value = getattr(args, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
        if not 0 < args.share <= 1:
            raise ConfigError(f"--share must be above 0 and at most 1, got {args.share:g}")
        if args.max_context is not None and args.max_context < 2:
            raise ConfigError("--max-context must leave room for a prompt and an answer")
        if args.trace is None and not args.measure:
            raise ConfigError("give --trace FILE to plan for, --measure, or both; or --memory")
        if not args.measure and (args.url or args.model or args.config is not None or args.set):
            raise ConfigError("--url, --model, --config and --set say what --measure measures: give it, or --memory")
        if args.url and args.model:
            raise ConfigError("--url measures the cluster that runs there: leave out --model")
        low, _, high = args.token_range.partition(":")
        if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
            raise ConfigError(f"--token-range takes LOW:HIGH, got {args.token_range!r}")
        source = None
        if args.measure:
            tokens = int(low), int(high)
            source = CostSource(args.url, args.model or "demo", args.config, tuple(args.set), tokens)
        return cls(
            args.trace, AnswerTarget.read(args.slo), args.share, args.costs, source, args.speed, args.limit,
            args.scale_lengths, args.max_context, args.max_workers, args.policy, args.json,
        )  # fmt: skip

    def load(self) -> PlannedLoad:
        """Raises `ConfigError` for a trace that can't be read."""
        assert self.trace is not None, "there is a trace to plan for"
        try:
            lines = read_trace(self.trace, self.limit)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--trace: {error}") from None
        return PlannedLoad(lines, self.target, self.speed, self.scale_lengths, self.max_context, policy=self.policy)


def plan(options: PlanOptions, say: Callable[[str], None], show: Callable[[Any], None]) -> bool:
    """Run the command; returns whether there are pools that keep the target. Raises `ConfigError`."""
    load = options.load() if options.trace is not None else None  # Before anything is measured for a minute.
    if options.source is not None:
        costs = measure_costs(options.source, say)
        costs.write(options.costs)
        say(
            f"measured: first tokens are explained to {costs.prompt_error:.1%}, tokens of batches to "
            f"{costs.batch_error:.1%}; written to {options.costs}"
        )
    else:
        costs = read_costs(options.costs)
    if load is None:
        if costs.doubtful:
            say(doubt(costs))
        return True
    search = PoolSearch(
        lambda prefill, decode: load.predict(costs, prefill, decode), options.share, options.max_workers
    )
    found = search.smallest()
    shown = found or search.look(options.max_workers, options.max_workers)
    rows = sorted({id(one): one for one in (shown, *search.beside(shown))}.values(), key=lambda one: one.workers)
    say(f"{len(load.lines):,} requests, target {options.target} for {options.share:.0%} of them")
    show(plan_table(rows, found, options.share))
    for line in plan_lines(shown, costs, enough=found is not None, options_share=options.share):
        say(line)
    if options.json is not None:
        _write(options.json, rows, found, costs)
    return found is not None


def _write(path: Path, rows: Sequence[PoolPrediction], found: PoolPrediction | None, costs: MeasuredCosts) -> None:
    tree = {
        "chosen": dataclasses.asdict(found) if found is not None else None,
        "looked_at": [dataclasses.asdict(one) for one in rows],
        "costs": dataclasses.asdict(costs),
    }
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def plan_table(rows: Sequence[PoolPrediction], found: PoolPrediction | None, share: float) -> RenderableType:
    """A row for each prediction; `found` is the one that was chosen."""
    from rich.table import Table

    out = Table(pad_edge=False)
    for column in ("prefill", "decode", "TTFT p50, p99", "ITL p50, p99", "good", "goodput/s"):
        out.add_column(column, justify="right")
    out.add_column("why")
    for one in rows:
        report = one.report
        cells = (
            str(one.prefill),
            str(one.decode),
            f"{1e3 * report.ttft_p50_s:,.0f}, {1e3 * report.ttft_p99_s:,.0f} ms",
            f"{1e3 * report.itl_p50_s:,.1f}, {1e3 * report.itl_p99_s:,.1f} ms",
            f"{report.good:.1%}",
            f"{report.goodput:,.2f}",
            why(one, found, share),
        )
        out.add_row(*cells, style="bold green" if one is found else None)
    return out


def why(one: PoolPrediction, found: PoolPrediction | None, share: float) -> str:
    """Why these sizes are the ones, or aren't."""
    report = one.report
    if one is found:
        return f"the fewest workers that keep the target for {share:.0%}"
    if report.good >= share:
        return "enough, and a worker more" if found is not None and one.workers > found.workers else "enough as well"
    late = 1 - report.ttft_met
    slow = report.ttft_met - report.good
    if late >= slow:
        return f"{late:.1%} of first tokens late"
    return f"{slow:.1%} of answers too slow from token to token"


def plan_lines(shown: PoolPrediction, costs: MeasuredCosts, *, enough: bool, options_share: float) -> Iterator[str]:
    """What to start, the memory that it takes, and on what the prediction rests."""
    if enough:
        yield f"twinpool serve --prefill {shown.prefill} --decode {shown.decode}"
    else:
        yield (
            f"NO POOLS of up to {shown.prefill} workers each keep the target for {options_share:.0%}: "
            f"{why(shown, None, options_share)}; a step alone may take longer than the target"
        )
    peak = -(-shown.decode_peak // costs.page_tokens) * costs.page_tokens
    size = f" ({peak * costs.position_bytes / 2**20:,.0f} MiB)" if costs.position_bytes else ""
    room = "" if shown.decode_peak < costs.decode_tokens else "; it was full, and requests waited or were retracted"
    yield (
        f"a decode worker holds {peak:,} positions at most{size}, of the {costs.decode_tokens:,} that it has: "
        f"decode.cache.device_tokens={peak} is enough for this load{room}"
    )
    if costs.doubtful:
        yield doubt(costs)
    yield (
        f"by costs of {costs.model}, measured {costs.measured_at} on {costs.machine}: workers are taken to be such "
        "machines, each for itself"
    )


def doubt(costs: MeasuredCosts) -> str:
    """A warning about costs that explain badly what they were made of."""
    return (
        f"DON'T BELIEVE IT: the costs are {costs.prompt_error:.0%} off the first tokens that were measured, and "
        f"{costs.batch_error:.0%} off the batches: the machine did other things, or its steps aren't linear in what "
        "they compute; measure again on one that does nothing else"
    )
