"""What routers tell the autoscaler, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, field

from twinpool.contracts.ids import Role
from twinpool.contracts.message_types import NAME_CHARS, SOME, Finite, Message, Uint32, Uint64


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """One latency that is promised, as its setting has it."""

    latency: str
    """``ttft`` or ``itl``."""
    seconds: float
    share: float | None
    """The share of requests, or of deliveries, that are to meet it, from 0 to 1; None: all."""
    setting: str


class LatencyCounts(Message, frozen=True):
    """What one router has counted since its start."""

    requests: Uint64 = 0
    """Choices that have come, those that were refused for want of room included."""
    first_tokens: Uint64 = 0
    """Choices that got their first token, or were refused or dropped because it would have come too late."""
    first_late: Uint64 = 0
    """Those of them for which it came later than the target, or not at all."""
    gaps: Uint64 = 0
    """Deliveries of tokens after an answer's first."""
    gaps_late: Uint64 = 0
    """Those of them that came later after the one before than the target."""


class LatencyReport(Message, frozen=True):
    """The counts of one router."""

    router: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    """Names one start of the router; the counts are since then."""
    counts: LatencyCounts


class PoolSizing(Message, frozen=True):
    """One pool as the autoscaler sees it."""

    role: Role
    ready: Uint32
    wanted: Uint32
    """Workers that it has or is to have, those that are starting included and those that leave left out."""
    least: Uint32
    most: Uint32
    need: Finite
    """Workers that the load needs; below 0 while that isn't known."""
    why: str
    """What the need comes from, or why nothing is decided, in words."""


class SizingDecision(Message, frozen=True):
    """One change that the autoscaler has made."""

    ago_s: Finite
    text: str
    """What was changed, and why."""


class AutoscalerView(Message, frozen=True):
    """The autoscaler as operators see it."""

    pools: Annotated[tuple[PoolSizing, ...], SOME] = ()
    decisions: Annotated[tuple[SizingDecision, ...], SOME] = ()
    """The latest ones, the newest first."""
    held_s: Finite = 0.0
    """Seconds for which it leaves the pools alone yet, because an operator has changed one."""
    counters: Annotated[dict[str, Uint64], SOME] = field(default_factory=dict)
    """How often it has decided what, since the controller's start."""
