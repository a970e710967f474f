"""From outcomes to figures: percentiles, throughput, goodput, errors by kind, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from twinpool.cli.replay.openai_client import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """What counts as good: both limits, each in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def holds(self, outcome: Outcome) -> bool:
        """A failed or wrongly counted answer is never good."""
        if not outcome.ok or _miscounted(outcome):
            return False
        tpot_s = outcome.tpot_s
        return (self.ttft_ms is None or outcome.ttft_s * 1e3 <= self.ttft_ms) and (
            self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms
        )


def _miscounted(outcome: Outcome) -> bool:
    """Whether the answer is not as long as asked for, or its length is unknown."""
    return outcome.completion_tokens != outcome.wanted_tokens


@dataclass(frozen=True)
class Spread:
    """Percentiles of one figure, in milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    count: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = np.fromiter(seconds, dtype=np.float64) * 1e3
        if not len(values):
            return cls(None, None, None, None, 0)
        p50, p90, p99 = (float(v) for v in np.percentile(values, PERCENTILES))
        return cls(float(values.mean()), p50, p90, p99, len(values))


@dataclass(frozen=True)
class Summary:
    """One endpoint under one load. Latencies and token counts are of successes alone."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    notes: dict[str, str]
    """The first message of each kind of error."""
    miscounted: int
    """Successes whose answer was not as long as asked for, or did not say how long it was."""
    wall_s: float
    ttft_ms: Spread
    itl_ms: Spread
    """Gaps between events that carry tokens."""
    tpot_ms: Spread
    e2e_ms: Spread
    lag_ms: Spread
    """How late the client itself sent: a large value means that the client could not keep up."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    """Requests a second within the SLO."""
    good_share: float
    cached_share: float
    """Of the prompt tokens, as the server counts them."""
    client_cpu_share: float
    """The client's own processor time, in cores."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(outcomes: Sequence[Outcome], slo: Slo, wall_s: float, cpu_s: float) -> Summary:
    """Figures of all requests of one endpoint; `wall_s` and `cpu_s` add up over its runs."""
    good = [outcome for outcome in outcomes if outcome.ok]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    notes: dict[str, str] = {}
    for outcome in failed:
        notes.setdefault(outcome.error or "", outcome.note)
    within = sum(slo.holds(outcome) for outcome in outcomes)
    # The server's own count of prompt tokens where it gives one: ours is an estimate for text.
    inputs = sum(o.prompt_tokens if o.prompt_tokens is not None else o.input_tokens for o in good)
    return Summary(
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(Counter(outcome.error or "" for outcome in failed).most_common()),
        notes=notes,
        miscounted=sum(_miscounted(outcome) for outcome in good),
        wall_s=wall_s,
        ttft_ms=Spread.of(outcome.ttft_s for outcome in good),
        itl_ms=Spread.of(gap for outcome in good for gap in outcome.gaps_s),
        tpot_ms=Spread.of(tpot_s for outcome in good if (tpot_s := outcome.tpot_s) is not None),
        e2e_ms=Spread.of(outcome.e2e_s for outcome in good),
        lag_ms=Spread.of(outcome.sent_s - outcome.due_s for outcome in outcomes),
        requests_per_s=len(good) / wall_s,
        input_tokens_per_s=inputs / wall_s,
        output_tokens_per_s=sum(outcome.output_tokens for outcome in good) / wall_s,
        goodput_per_s=within / wall_s,
        good_share=within / len(outcomes) if outcomes else 0.0,
        cached_share=sum(o.cached_tokens for o in good) / inputs if inputs else 0.0,
        client_cpu_share=cpu_s / wall_s,
    )


SPREADS = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
    ("client lag", "lag_ms"),
)
RATES = (
    ("requests/s", "requests_per_s"),
    ("input tokens/s", "input_tokens_per_s"),
    ("output tokens/s", "output_tokens_per_s"),
    ("goodput, requests/s", "goodput_per_s"),
)


def ratios(summary: Summary, baseline: Summary) -> dict[str, float | None]:
    """`summary` over `baseline`: below 1 is faster for latencies (`_ms`), above 1 for rates."""
    out: dict[str, float | None] = {}
    for _, name in SPREADS[:-1]:
        for q in PERCENTILES:
            out[f"{name}_p{q}"] = _ratio(getattr(getattr(summary, name), f"p{q}"), getattr(baseline, name), q)
    for _, name in RATES:
        ours, theirs = getattr(summary, name), getattr(baseline, name)
        out[name] = ours / theirs if theirs else None
    return out


def _ratio(ours: float | None, baseline: Spread, q: int) -> float | None:
    theirs: float | None = getattr(baseline, f"p{q}")
    return ours / theirs if ours is not None and theirs else None


def table(sides: Mapping[str, Summary]) -> Table:
    """All sides beside each other; with two, also the first over the second."""
    out = Table(title=None, pad_edge=False)
    out.add_column("")
    for name in sides:
        out.add_column(name, justify="right")
    pair = list(sides.values()) if len(sides) == 2 else None
    quotients = ratios(*pair) if pair else {}
    if pair:
        out.add_column("ratio", justify="right")

    def row(label: str, cells: list[str], key: str | None = None) -> None:
        quotient = quotients.get(key) if key else None
        out.add_row(label, *cells, *([f"{quotient:.2f}" if quotient is not None else ""] if pair else []))

    for label, name in SPREADS:
        for q in PERCENTILES:
            values = [getattr(getattr(s, name), f"p{q}") for s in sides.values()]
            row(f"{label} p{q}, ms", ["-" if v is None else f"{v:.2f}" for v in values], f"{name}_p{q}")
    for label, name in RATES:
        row(label, [f"{getattr(s, name):.2f}" for s in sides.values()], name)
    row("within SLO", [f"{s.good_share:.1%}" for s in sides.values()])
    row("input from cache", [f"{s.cached_share:.1%}" for s in sides.values()])
    row("succeeded", [f"{s.succeeded} of {s.requests}" for s in sides.values()])
    for kind in sorted({kind for s in sides.values() for kind in s.errors}):
        row(f"[red]error: {kind}[/red]", [str(s.errors.get(kind, 0)) for s in sides.values()])
    if any(s.miscounted for s in sides.values()):
        row("[yellow]wrong token count[/yellow]", [str(s.miscounted) for s in sides.values()])
    row("wall, s", [f"{s.wall_s:.1f}" for s in sides.values()])
    row("client CPU, cores", [f"{s.client_cpu_share:.2f}" for s in sides.values()])
    return out
