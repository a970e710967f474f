"""The sites at which state is checked for damage, by the names that metrics and logs use for them.

Every check that finds damaged state counts into `twinpool_state_damage_total{where}` and logs one line `state damage`
with the same `where`. A worker reports its counts among the counters of its heartbeats: the counters in `COUNTERS`, and
any other whose name is ``damage_`` and the `where`.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from functools import lru_cache

PREFIX = "damage_"
"""Prefix of the names of a worker's other damage counters, before the `where`: ``damage_restore``, say."""


class DamageSite(StrEnum):
    """The sites that check bytes. A worker's `check` of its accounts is none of them: it recounts, and reads no
    bytes."""

    HANDOVER = "handover"
    """A page, state or metadata slot that prefill sent isn't what it sealed."""
    LOAD = "load"
    """A page or state that came from host memory to the device isn't what was saved."""
    STORAGE = "storage"
    """A storage object isn't what was stored under its name."""
    STEP = "step"
    """A forward pass found a page or slot given away: its epoch isn't the one in the block table."""
    RESTORE = "restore"
    """State that a retracted request left in host memory or storage isn't what was saved."""
    ARENA = "arena"
    """A page that a dead worker left in host memory isn't what the worker sealed."""
    LOGITS = "logits"
    """A step's logits weren't finite (NaN, infinity): no token was drawn from them."""
    AUDIT = "audit"
    """A finished answer came out otherwise when it was computed again."""


COUNTERS = {
    "pages_damaged": DamageSite.HANDOVER,
    "pages_damaged_on_host": DamageSite.LOAD,
    "pages_damaged_in_storage": DamageSite.STORAGE,
    "stale_pages": DamageSite.STEP,
    "states_damaged_swapped": DamageSite.RESTORE,
    "arena_pages_damaged": DamageSite.ARENA,
}
"""Names of the workers' counters that count damage, each with its site."""


@lru_cache(maxsize=1024)
def where_of(counter: str) -> str | None:
    """The `where` of a worker's damage counter; None for a counter of something else."""
    if counter in COUNTERS:
        return COUNTERS[counter]
    return counter.removeprefix(PREFIX) if counter.startswith(PREFIX) else None


def log_damage(log: logging.Logger, where: DamageSite, **facts: object) -> None:
    """Log one finding in one line. `facts`: what was damaged (`request_id`, `pool`, `pages`, ...), and what becomes of
    it."""
    log.error("state damage", extra={"where": str(where), **facts})
