"""Figures of a replay as pictures, by matplotlib: the extra `plots` of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinpool.cli.replay.openai_client import Outcome
from twinpool.cli.replay.replay_figures import ttft_of
from twinpool.contracts.errors import ConfigError
from twinpool.sim.scale.cluster_plan import LatencyTarget

_POINTS = 200


def check_plots() -> None:
    """Raises `ConfigError` where matplotlib isn't installed: before a run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plots needs matplotlib: pip install 'twinpool[plots]', or leave it out") from None


def draw_plots(folder: Path, outcomes: Sequence[Outcome], began_s: float, target: LatencyTarget) -> list[Path]:
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


def _first_tokens(axes: Any, whole: Sequence[Outcome], began_s: float, target: LatencyTarget) -> None:
    axes.plot([one.due_s - began_s for one in whole], [ttft_of(one) for one in whole], ".", markersize=3)
    axes.axhline(target.ttft_s, color="tab:red", linewidth=1, label=f"target, {target.ttft_s:g} s")
    axes.set(xlabel="due, s since the start", ylabel="to the first token, s", title="First tokens")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _shares(axes: Any, whole: Sequence[Outcome], began_s: float, target: LatencyTarget) -> None:
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


def _load(axes: Any, sent: Sequence[Outcome], began_s: float, target: LatencyTarget) -> None:
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
