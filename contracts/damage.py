"""Where state is checked, under the names that metrics and logs use for it.

Every check that finds state which isn't what it should be counts into `twinpool_state_damage_total{where}` and logs one
line `state damage` with the same `where`. A worker reports its counts among the counters of its heartbeats: those in
`COUNTERS`, and any other named ``damage_`` and a `where` of its own.
"""

from __future__ import annotations

import logging
from enum import StrEnum

PREFIX = "damage_"
"""How a worker's counter of another `where` begins: ``damage_restore``, say."""


class DamageSite(StrEnum):
    """The places that check. `check` of a worker's books is none of them: that is about counts, not bytes."""

    HANDOVER = "handover"
    """A page, state or metadata slot that prefill sent isn't what it sealed."""
    LOAD = "load"
    """A page or state that came from host memory to the device isn't what was saved."""
    STORAGE = "storage"
    """An object of storage isn't what was stored under its name."""
    STEP = "step"
    """A forward pass found a page or slot given away: its epoch isn't the one in the block table."""
    RESTORE = "restore"
    """What a retracted request left in host memory or storage isn't what was saved."""
    ARENA = "arena"
    """What a dead worker left in host memory isn't what it sealed."""
    LOGITS = "logits"
    """A step's logits were no finite numbers (NaN, infinity): nothing was drawn from them."""
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
"""Counters of workers, by name, that count damage."""


def where_of(counter: str) -> str | None:
    """The `where` that a worker's counter counts; None for one that counts something else."""
    if counter in COUNTERS:
        return COUNTERS[counter]
    return counter.removeprefix(PREFIX) if counter.startswith(PREFIX) else None


def log_damage(log: logging.Logger, where: DamageSite, **facts: object) -> None:
    """One line for each finding: what was damaged (`request`, `pool`, `pages`, ...), and what becomes of it."""
    log.error("state damage", extra={"where": str(where), **facts})
