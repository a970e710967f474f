"""What a replay shows: a view while it runs, tables at its end, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.cli.latency_target import shown_target
from twinpool.cli.replay.open_loop import OpenLoop
from twinpool.cli.replay.openai_client import Outcome
from twinpool.cli.replay.replay_figures import Latencies, RecentFigures, ReplayFigures
from twinpool.sim.scale.cluster_plan import LatencyTarget

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOTE_CHARS = 100


def _pair(latencies: Latencies) -> str:
    return f"{1e3 * latencies.p50:,.1f} / {1e3 * latencies.p99:,.1f} ms" if latencies.count else "-"


def live_view(loop: OpenLoop, recent: RecentFigures, total: int, now: float) -> RenderableType:
    """A table of the run so far."""
    from rich.table import Table

    ttft, itl, rate = recent.look(now)
    seconds = max(now - loop.began_s, 1e-9)
    out = Table(show_header=False, box=None, pad_edge=False)
    for label, value in (
        ("sent", f"{loop.sent:,} of {total:,} in {seconds:,.0f} s"),
        ("in flight", f"{loop.running:,}"),
        (f"answers/s, last {recent.seconds:g} s", f"{rate:,.1f}"),
        ("TTFT p50 / p99", _pair(ttft)),
        ("ITL p50 / p99", _pair(itl)),
        ("good", f"{recent.good:,} of {recent.ended:,}, {recent.good / seconds:,.2f}/s"),
        ("errors", ", ".join(f"{kind} {count}" for kind, count in recent.errors.most_common(4)) or "none"),
    ):
        out.add_row(label, value)
    return out


def live_line(loop: OpenLoop, recent: RecentFigures, total: int, now: float) -> str:
    """The same in a line, where nobody looks at a screen."""
    ttft, itl, rate = recent.look(now)
    errors = sum(recent.errors.values())
    return (
        f"{now - loop.began_s:6.0f} s: {loop.sent} of {total} sent, {loop.running} in flight, {rate:.1f} answers/s, "
        f"TTFT {_pair(ttft)}, ITL {_pair(itl)}, {recent.good} good, {errors} errors"
    )


def final_table(figures: ReplayFigures, target: LatencyTarget) -> RenderableType:
    """All figures of a run."""
    from rich.table import Table

    out = Table(pad_edge=False, title=None)
    for column in ("", "p50", "p90", "p99", "mean"):
        out.add_column(column, justify="right" if column else "left")
    for label, values in (
        ("TTFT, ms", figures.ttft),
        ("ITL, ms", figures.itl),
        ("TPOT of an answer, ms", figures.tpot),
        ("answer, ms", figures.answer),
        ("held for a place, ms", figures.held),
        ("client late, ms", figures.late),
    ):
        cells = [f"{1e3 * value:,.1f}" for value in (values.p50, values.p90, values.p99, values.mean)]
        out.add_row(label, *(cells if values.count else ["-"] * 4))
    for label, text in (
        ("answered", f"{figures.answered:,} of {figures.sent:,}"),
        ("requests/s", f"{figures.requests_per_s:,.2f}"),
        ("tokens/s in, out", f"{figures.input_tokens_per_s:,.0f}, {figures.output_tokens_per_s:,.0f}"),
        (f"good ({shown_target(target)})", f"{figures.good:,}, {figures.goodput:,.2f}/s"),
        ("prompt from cache", f"{figures.cached_share:.1%}"),
        ("client", f"{figures.client_cores:.2f} cores"),
    ):
        out.add_row(label, text, "", "", "")
    return out


def final_lines(figures: ReplayFigures) -> list[str]:
    """What went wrong, what the client itself could do, and whether it was the one that lagged."""
    lines = []
    for kind, count in figures.errors.items():
        note = " ".join(figures.notes.get(kind, "").split())[:_NOTE_CHARS]
        lines.append(f"ERROR {kind}: {count}{f' (first: {note})' if note else ''}")
    lines += [f"WRONG {kind}: {count}" for kind, count in figures.wrong.items()]
    if figures.unfinished:
        lines.append(f"{figures.unfinished} requests were under way when the replay was stopped; they count nowhere")
    lines.append(
        f"the client took {1e3 * figures.client_cores * figures.wall_s / max(1, figures.sent):.2f} ms of a core a "
        f"request: its ceiling is about {figures.client_ceiling:,.0f} such requests a second"
    )
    if figures.lagged:
        lines.append(
            f"THE CLIENT LAGGED: requests went out up to {1e3 * figures.late.p99:,.0f} ms late (p99) by its own fault, "
            "so the load was less sharp than the trace's; take a machine with a free core, or a lower --speed"
        )
    if figures.held.p99 > 0:
        lines.append(
            f"--concurrency held requests for {1e3 * figures.held.p99:,.0f} ms (p99): it counts as the endpoint's time"
        )
    return lines


def write_json(
    path: Path, settings: Mapping[str, Any], figures: ReplayFigures, records: list[dict[str, Any]] | None
) -> None:
    out: dict[str, Any] = {"settings": dict(settings), "figures": figures.to_dict()}
    if records is not None:
        out["records"] = records
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def record_of(outcome: Outcome, began_s: float) -> dict[str, Any]:
    """One request as JSON; seconds since the run's start, or since it was sent."""
    return {
        "due_s": round(outcome.due_s - began_s, 6),
        "held_s": round(outcome.held_s, 6),
        "late_s": round(outcome.lag_s, 6),
        "arrivals_s": [round(at - outcome.sent_s, 6) for at in outcome.arrivals_s],
        "end_s": round(outcome.e2e_s, 6) if outcome.end_s else None,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "wanted_tokens": outcome.wanted_tokens,
        "error": outcome.error,
        "note": outcome.note,
    }
