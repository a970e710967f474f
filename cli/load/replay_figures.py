"""Figures of a replay, of the whole run and of its last seconds while it goes on, and how they are shown: a view while
it goes on, tables at its end, JSON, and pictures by matplotlib (the extra `plots` of the package)."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinpool.cli.load.open_loop import OpenLoop
from twinpool.cli.load.openai_client import Outcome
from twinpool.contracts.errors import ConfigError
from twinpool.sim.scale.cluster_plan import AnswerTarget

if TYPE_CHECKING:
    from rich.console import RenderableType

LATE_S = 0.02
"""A client's p99 of lateness beyond which its figures aren't the endpoint's alone."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Percentiles of one figure, in seconds; all 0 where nothing was measured."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> LatencySummary:
        values = np.fromiter(seconds, dtype=np.float64)
        if not len(values):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(len(values), float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What a run came to. Latencies are of answers that ended well."""

    sent: int
    answered: int
    unfinished: int
    """Cut off by the end of the replay itself."""
    errors: dict[str, int]
    """Requests without a whole answer, by kind: a stream without [DONE], an error event, a status, no connection."""
    notes: dict[str, str]
    """The first message of each kind."""
    wrong: dict[str, int]
    """Answers that ended well with counts of tokens that aren't what was asked for, or with none."""
    wall_s: float
    ttft: LatencySummary
    """To the first token, from when the request could have gone out; waiting for a place counts."""
    itl: LatencySummary
    """Gaps between events that carry tokens."""
    tpot: LatencySummary
    """Times per output token: an answer's mean after its first token, by which `--slo` judges."""
    answer: LatencySummary
    held: LatencySummary
    """Seconds for which requests waited for a place, those that didn't among them."""
    late: LatencySummary
    """Seconds by which the client itself was late."""
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    good: int
    goodput: float
    """Answers a second that kept the target."""
    cached_share: float
    client_cores: float
    """The client's own processor time, in cores."""

    @property
    def client_ceiling(self) -> float:
        """Requests of this kind a second that the client could send on its core: measured processor time, not a
        guess, but nothing else may take that core."""
        return self.sent / (self.client_cores * self.wall_s) if self.client_cores and self.wall_s else 0.0

    @property
    def lagged(self) -> bool:
        """Whether the client was so late that its figures aren't the endpoint's alone."""
        return self.late.p99 > LATE_S

    @property
    def clean(self) -> bool:
        """Whether every answer came whole and right."""
        return not self.errors and not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"client_ceiling": self.client_ceiling, "client_lagged": self.lagged}


def ttft_of(outcome: Outcome) -> float:
    """Seconds to the first token, with those for which it waited for a place."""
    return outcome.ttft_s + outcome.held_s


def is_good(outcome: Outcome, target: AnswerTarget) -> bool:
    """Whether an answer came whole and kept the target."""
    if not outcome.ok or not outcome.arrivals_s:
        return False
    tpot = outcome.tpot_s
    return ttft_of(outcome) <= target.ttft_s and (tpot is None or tpot <= target.tpot_s)


def wrongness(outcome: Outcome, *, counts_prompts: bool, exact: bool) -> str:
    """What is wrong with the counts of an answer that ended well; empty where nothing is. `counts_prompts`: whether
    its prompt's tokens are known; `exact`: whether it had to be as long as asked for."""
    if outcome.completion_tokens is None:
        return "no usage"
    wanted, told = outcome.wanted_tokens, outcome.completion_tokens
    if told > wanted or (exact and told != wanted):
        return "answer's tokens differ"
    if counts_prompts and outcome.prompt_tokens != outcome.input_tokens:
        return "prompt's tokens differ"
    return ""


def figures_of(
    outcomes: Sequence[Outcome],
    target: AnswerTarget,
    wall_s: float,
    cpu_s: float,
    *,
    counts_prompts: bool,
    exact: bool,
) -> ReplayFigures:
    """Figures of a run that took `wall_s` seconds and `cpu_s` of this process's time."""
    ended = [outcome for outcome in outcomes if outcome.end_s]
    whole = [outcome for outcome in ended if outcome.ok]
    notes: dict[str, str] = {}
    for outcome in ended:
        if outcome.error is not None:
            notes.setdefault(outcome.error, outcome.note)
    judged = (wrongness(outcome, counts_prompts=counts_prompts, exact=exact) for outcome in whole)
    good = sum(is_good(outcome, target) for outcome in ended)
    inputs = sum(outcome.prompt_tokens or outcome.input_tokens for outcome in whole)
    wall = max(wall_s, 1e-9)
    return ReplayFigures(
        sent=len(outcomes),
        answered=len(whole),
        unfinished=len(outcomes) - len(ended),
        errors=dict(Counter(outcome.error for outcome in ended if outcome.error is not None).most_common()),
        notes=notes,
        wrong=dict(Counter(kind for kind in judged if kind).most_common()),
        wall_s=wall_s,
        ttft=LatencySummary.of(ttft_of(outcome) for outcome in whole),
        itl=LatencySummary.of(gap for outcome in whole for gap in outcome.gaps_s),
        tpot=LatencySummary.of(tpot for outcome in whole if (tpot := outcome.tpot_s) is not None),
        answer=LatencySummary.of(outcome.e2e_s + outcome.held_s for outcome in whole),
        held=LatencySummary.of(outcome.held_s for outcome in outcomes),
        late=LatencySummary.of(max(0.0, outcome.lag_s) for outcome in outcomes),
        requests_per_s=len(whole) / wall,
        output_tokens_per_s=sum(outcome.output_tokens for outcome in whole) / wall,
        input_tokens_per_s=inputs / wall,
        good=good,
        goodput=good / wall,
        cached_share=sum(outcome.cached_tokens for outcome in whole) / inputs if inputs else 0.0,
        client_cores=cpu_s / wall,
    )


class RecentFigures:
    """Figures of answers that ended in the last seconds, bounded in number."""

    MAX = 4096

    def __init__(self, target: AnswerTarget, seconds: float = 10.0) -> None:
        self._target, self.seconds = target, seconds
        self._ended: deque[tuple[float, Outcome]] = deque(maxlen=self.MAX)
        self.errors: Counter[str] = Counter()
        """By kind, since the start."""
        self.ended = self.good = 0

    def add(self, outcome: Outcome) -> None:
        self.ended += 1
        self.good += is_good(outcome, self._target)
        if outcome.error is not None:
            self.errors[outcome.error] += 1
        self._ended.append((outcome.end_s, outcome))

    def look(self, now: float) -> tuple[LatencySummary, LatencySummary, float]:
        """First tokens, gaps between tokens, and answers a second, of the last `seconds` before `now`."""
        while self._ended and self._ended[0][0] < now - self.seconds:
            self._ended.popleft()
        whole = [outcome for _, outcome in self._ended if outcome.ok]
        gaps = LatencySummary.of(gap for outcome in whole for gap in outcome.gaps_s)
        return LatencySummary.of(ttft_of(outcome) for outcome in whole), gaps, len(whole) / self.seconds


_NOTE_CHARS = 100


def _pair(latencies: LatencySummary) -> str:
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


def final_table(figures: ReplayFigures, target: AnswerTarget) -> RenderableType:
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
        (f"good ({target})", f"{figures.good:,}, {figures.goodput:,.2f}/s"),
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


_POINTS = 200


def check_plots() -> None:
    """Raises `ConfigError` where matplotlib isn't installed: before a run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plots needs matplotlib: pip install 'twinpool[plots]', or leave it out") from None


def draw_plots(folder: Path, outcomes: Sequence[Outcome], began_s: float, target: AnswerTarget) -> list[Path]:
    """Write `first-tokens.png`, `latencies.png` and `load.png` into `folder`; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    whole = [outcome for outcome in outcomes if outcome.end_s and outcome.ok]
    drawn = []
    for name, draw in (("first-tokens", _first_tokens), ("latencies", _shares), ("load", _load)):
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        draw(axes, whole if draw is not _load else outcomes, began_s, target)
        path = folder / f"{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def _first_tokens(axes: Any, whole: Sequence[Outcome], began_s: float, target: AnswerTarget) -> None:
    axes.plot([one.due_s - began_s for one in whole], [ttft_of(one) for one in whole], ".", markersize=3)
    axes.axhline(target.ttft_s, color="tab:red", linewidth=1, label=f"target, {target.ttft_s:g} s")
    axes.set(xlabel="due, s since the start", ylabel="to the first token, s", title="First tokens")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _shares(axes: Any, whole: Sequence[Outcome], began_s: float, target: AnswerTarget) -> None:
    for label, values in (
        ("first token", [ttft_of(one) for one in whole]),
        ("time per output token (TPOT)", [at for one in whole if (at := one.tpot_s) is not None]),
        ("gaps between tokens", [gap for one in whole for gap in one.gaps_s]),
    ):
        if values:
            shares = np.linspace(0, 100, _POINTS)
            axes.plot(np.percentile(values, shares), shares, label=label)
    axes.set(xlabel="s", ylabel="% of them are quicker", xscale="log", title="Latencies")
    axes.legend(loc="lower right")


def _load(axes: Any, sent: Sequence[Outcome], began_s: float, target: AnswerTarget) -> None:
    ends = [one.end_s for one in sent if one.end_s]
    last = max([*ends, *(one.sent_s for one in sent)], default=began_s)
    times = np.linspace(began_s, last, _POINTS)
    starts = np.sort([one.sent_s for one in sent])
    running = np.searchsorted(starts, times, "right") - np.searchsorted(np.sort(ends), times, "right")
    axes.plot(times - began_s, running, label="in flight")
    axes.plot([one.sent_s - began_s for one in sent], [1e3 * max(0.0, one.lag_s) for one in sent], ".", markersize=2,
              label="client late, ms")  # fmt: skip
    axes.set(xlabel="s since the start", title="Load")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
