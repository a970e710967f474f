"""Loads and configurations for tests of the autoscaler against `tests.support.autoscaling_queue_model`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.support.autoscaling_queue_model import AutoscalingModel, ModelAsk, ModelCosts
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role

COSTS = ModelCosts(compute_per_s=4000.0, pages=4000, start_s=10.0)
QUICK = {
    "period_s": 5, "window_s": 20, "shrink_window_s": 100, "shrink_cooldown_s": 20, "role_window_s": 20,
    "role_cooldown_s": 60, "hold_s": 120, "backoff_s": 20, "max_backoff_s": 80, "start_wait_s": 60,
}  # fmt: skip


def scaling(**keys: Any) -> Config:
    """A configuration whose windows are short, and whose pools have 1 to 6 workers."""
    pools = {"prefill": {"max_workers": 6}, "decode": {"max_workers": 6}}
    return config_from_dict({"autoscaling": {"enabled": True, **pools, **QUICK, **keys}})


def poisson(seed: int, *phases: tuple[float, float], prompt: int = 2000, answer: int = 200) -> list[ModelAsk]:
    """Requests of phases, each of a rate a second and of so many seconds; tokens are exponential about their means."""
    rng, at, end, asks = random.Random(seed), 0.0, 0.0, []
    for rate, seconds in phases:
        at, end = end, end + seconds
        while (at := at + rng.expovariate(rate)) < end:
            asks.append(
                ModelAsk(at, max(1, round(rng.expovariate(1 / prompt))), max(2, round(rng.expovariate(1 / answer))))
            )
    return asks


def model(
    config: Config,
    asks: Sequence[ModelAsk],
    prefill: int = 2,
    decode: int = 2,
    costs: ModelCosts = COSTS,
    places: int = 99,
) -> AutoscalingModel:
    return AutoscalingModel(config, asks, costs, {Role.PREFILL: prefill, Role.DECODE: decode}, places)


def sizes_at(run: AutoscalingModel, at_s: float) -> tuple[int, int]:
    """Ready workers of both pools at a time of a run that is over."""
    (found,) = [(p, d) for at, p, d in run.figures.sizes if at <= at_s][-1:]
    return found


def turns(run: AutoscalingModel, which: int) -> int:
    """How often a pool (0: prefill) began to shrink after it had grown, or to grow after it had shrunk."""
    sizes = [size[1 + which] for size in run.figures.sizes]
    steps = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


def told(run: AutoscalingModel) -> list[str]:
    """What the autoscaler has decided, the latest first."""
    assert run.autoscaler is not None
    return [one.text for one in run.autoscaler.view().decisions]
