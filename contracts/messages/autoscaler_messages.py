"""What routers tell the autoscaler, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.contracts.ids import Role


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """One latency that is promised, as its setting has it."""

    latency: str
    """``ttft`` or ``itl``."""
    seconds: float
    share: float | None
    """The share of requests, or of deliveries, that are to meet it, from 0 to 1; None: all."""
    setting: str


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """What one router has counted since its start."""

    requests: int = 0
    """Choices that have come, those that were refused for want of room included."""
    first_tokens: int = 0
    """Choices that got their first token, or were refused or dropped because it would have come too late."""
    first_late: int = 0
    """Those of them for which it came later than the target, or not at all."""
    gaps: int = 0
    """Deliveries of tokens after an answer's first."""
    gaps_late: int = 0
    """Those of them that came later after the one before than the target."""


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """One pool as the autoscaler sees it."""

    role: Role
    ready: int
    wanted: int
    """Workers that it has or is to have, those that are starting included and those that leave left out."""
    least: int
    most: int
    need: float
    """Workers that the load needs; below 0 while that isn't known."""
    why: str
    """What the need comes from, or why nothing is decided, in words."""


@dataclass(frozen=True, slots=True)
class SizingDecision:
    """One change that the autoscaler has made."""

    ago_s: float
    text: str
    """What was changed, and why."""


@dataclass(frozen=True, slots=True)
class AutoscalerView:
    """The autoscaler as operators see it."""

    pools: tuple[PoolSizing, ...] = ()
    decisions: tuple[SizingDecision, ...] = ()
    """The latest ones, the newest first."""
    held_s: float = 0.0
    """Seconds for which it leaves the pools alone yet, because an operator has changed one."""
    counters: dict[str, int] = field(default_factory=dict)
    """How often it has decided what, since the controller's start."""
