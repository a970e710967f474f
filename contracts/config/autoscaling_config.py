"""Configuration section of the autoscaler: the bounds of the pools, what it aims at, and how it is damped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from twinpool.contracts.ids import PAIR, Role


@dataclass(frozen=True, slots=True)
class PoolBounds:
    min_workers: int = 1
    """The fewest workers that the autoscaler leaves the pool; a multiple of its `dp`, as `max_workers`."""
    max_workers: int = 4
    """The most workers that it brings the pool to."""


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    enabled: bool = False
    """Whether the controller changes the pools' sizes, and workers' roles, by load."""
    prefill: PoolBounds = field(default_factory=PoolBounds)
    decode: PoolBounds = field(default_factory=PoolBounds)
    max_workers: int = 0
    """The most workers of both pools together; where there are so many, workers change their role instead. 0: as many
    as both pools may have."""
    ttft_target_s: float = 2.0
    """Seconds to the first token within which `attainment` of the requests are to stay."""
    itl_target_s: float = 0.2
    """Seconds between two deliveries of an answer's tokens within which `attainment` of them are to stay. Accepted
    drafts are deliveries of their own, right after another one, and meet it."""
    attainment: float = 0.95
    """The share of requests, and of deliveries, that are to meet their target."""
    queue_target_s: float = 0.5
    """Seconds that a prompt may wait for a prefill worker: `attainment` of them are to wait less."""
    prefill_use: float = 0.7
    """The share of their time that prefill workers are to compute."""
    decode_use: float = 0.8
    """The share of their pages that requests are to hold on decode workers."""
    tolerance: float = 0.1
    """Nothing changes while what a pool needs differs from what it has by no more than this share, and a worker changes
    its role only where that relieves the shorter pool by more than this share."""
    period_s: float = 5.0
    """Seconds between two decisions."""
    window_s: float = 60.0
    """Seconds over which rates and shares are measured. Workers tell their counters every 5 s."""
    shrink_window_s: float = 300.0
    """A pool shrinks only to the most that it has needed within so many seconds, all of which were observed."""
    grow_cooldown_s: float = 15.0
    """Seconds between two growths of a pool."""
    shrink_cooldown_s: float = 60.0
    """Seconds from any change of a pool until it shrinks."""
    grow_step: int = 4
    """The most workers that a pool grows by at a time; where workers share their experts (`decode.dp`), whole groups,
    and one at least."""
    shrink_step: int = 1
    """The most workers that leave a pool at a time, as for `grow_step`."""
    role_window_s: float = 60.0
    """A worker changes its role only where every decision within so many seconds would have had it."""
    role_cooldown_s: float = 180.0
    """Seconds between two changes of roles."""
    start_wait_s: float = 600.0
    """Seconds that a start which the autoscaler ordered may wait for a node with a place, before it is given up."""
    backoff_s: float = 30.0
    """Seconds without growth after a start of the pool failed or was given up; doubled with each one, up to
    `max_backoff_s`."""
    max_backoff_s: float = 900.0
    """The longest such pause."""
    hold_s: float = 900.0
    """Seconds for which the autoscaler leaves both pools alone after an operator has changed one."""

    def bounds(self, role: Role) -> PoolBounds:
        """The bounds of a pool, of prefill or decode workers."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def max_together(self) -> int:
        """The most workers of both pools together."""
        return self.max_workers or sum(self.bounds(role).max_workers for role in PAIR)


def autoscaling_conflicts(config: AutoscalingConfig) -> Iterator[str]:
    """What one key needs of another and lacks, with the keys' names."""
    if not config.enabled:
        return
    name = "config key autoscaling."
    for role in PAIR:
        bounds = config.bounds(role)
        if bounds.min_workers > bounds.max_workers:
            yield (f"{name}{role}.min_workers={bounds.min_workers} is above {role}.max_workers={bounds.max_workers}")
    least = sum(config.bounds(role).min_workers for role in PAIR)
    if config.max_together < least:
        yield (f"{name}max_workers={config.max_workers} is below the two pools' min_workers, {least} together")
    for key in ("attainment", "tolerance"):
        if getattr(config, key) >= 1:
            yield f"{name}{key} is a share, below 1; got {getattr(config, key):g}"
    for key in ("prefill_use", "decode_use"):
        if getattr(config, key) > 1:
            yield f"{name}{key} is a share, at most 1; got {getattr(config, key):g}"
    for short, long in (
        ("period_s", "window_s"),
        ("window_s", "shrink_window_s"),
        ("period_s", "role_window_s"),
        ("backoff_s", "max_backoff_s"),
        ("queue_target_s", "ttft_target_s"),
    ):
        if getattr(config, short) > getattr(config, long):
            yield (f"{name}{short}={getattr(config, short):g} is above autoscaling.{long}={getattr(config, long):g}")
    if config.window_s < 3 * config.period_s:
        yield (
            f"{name}window_s={config.window_s:g} must be at least three times autoscaling.period_s={config.period_s:g}"
        )
