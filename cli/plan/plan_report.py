"""What a plan shows: the pools that were looked at, what they would come to, and why one was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from twinpool.sim.scale.measured_costs import MeasuredCosts
from twinpool.sim.scale.pool_search import PoolPrediction

if TYPE_CHECKING:
    from rich.console import RenderableType


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
