"""Where workers' times lie on the router's clock.

A worker tells the times of a leg from the leg's arrival there, which the router doesn't see. The leg can't have arrived
before it was sent, and not after the moment that each of its reports leaves for: when it came here, less the latest
time that it tells. A command may wait for the step that its worker computes, while reports leave at once when a step
ends; so a leg is placed as late as its reports allow. How much earlier it may have come is said with the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from twinpool.contracts.ids import Role
from twinpool.router.state.request_journal import JournalEntry, JournalKind

LegKey = tuple[int, Role]
"""A leg: its attempt, and the role."""


class LegClocks:
    """The arrivals of a request's legs at their workers, in seconds of the router's clock."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        sent: dict[LegKey, float] = {}
        latest: dict[LegKey, float] = {}
        for entry in entries:
            match entry.kind:
                case JournalKind.PLACED:
                    sent.update({(entry.attempt, role): entry.at for role in (Role.PREFILL, Role.DECODE)})
                case JournalKind.MOVE_PAUSED:
                    sent[entry.attempt, Role.DECODE] = entry.at
                case JournalKind.REPORT if entry.report is not None:
                    report, key = entry.report, (entry.attempt, entry.report.role)
                    told = max([0.0, *_instants(report.marks), *(note.at_s for note in report.notes)])
                    latest[key] = min(latest.get(key, math.inf), entry.at - told)
        self._at = {key: max(at, sent.get(key, -math.inf)) for key, at in latest.items()}
        self.uncertainty_s = max((self._at[key] - sent[key] for key in self._at if key in sent), default=0.0)
        """How much earlier a leg may have arrived than it is placed; the largest of all."""

    def time(self, key: LegKey, told_s: float) -> float:
        """When something happened that a leg tells; the leg must have reported."""
        return self._at[key] + told_s


def _instants(marks: dict[str, float]) -> list[float]:
    """The marks that are times; the others are durations."""
    return [seconds for name, seconds in marks.items() if name not in ("hidden", "exposed")]
