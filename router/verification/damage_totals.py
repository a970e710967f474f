"""Totals of the damage that workers have reported since this router started, whatever became of the workers.

A worker counts from its start and reports its counts in every heartbeat. The router adds up the counts of all
incarnations, so that a worker that is started again, or leaves, takes nothing off the metric. Damage that a worker
found after its last heartbeat is in the worker's log alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from twinpool.contracts.damage import where_of
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerStatus

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class DamageSample:
    """One worker's count of one kind of damage (`where`, from `contracts.damage`)."""

    worker: str
    role: str
    where: str
    count: float


class DamageTotals:
    """Damage counts by worker, role and `where`; bounded by the names that workers ever had."""

    def __init__(self) -> None:
        self._before: dict[tuple[WorkerName, Role, str], float] = {}
        """The counts of earlier incarnations."""
        self._now: dict[WorkerName, tuple[Incarnation, Role, dict[str, float]]] = {}
        self._seen: dict[WorkerName, WorkerStatus] = {}
        """The latest status of each worker that was taken in: most tables bring it again."""

    def on_statuses(self, statuses: Iterable[WorkerStatus]) -> None:
        """Take in workers' statuses; that of an older incarnation than the one known is ignored."""
        for status in statuses:
            if status is self._seen.get(status.name):
                continue
            self._seen[status.name] = status
            incarnation, role, known = self._now.get(status.name, (status.incarnation, status.role, {}))
            if incarnation > status.incarnation:
                continue
            if incarnation < status.incarnation:
                for where, value in known.items():
                    _add(self._before, (status.name, role, where), value)
                known = {}
            # A status without counters (of a worker that has ended) takes nothing back.
            counts = {w: max(value, known.get(w, 0.0)) for w, value in _counts(status.counters).items()}
            self._now[status.name] = (status.incarnation, status.role, {**known, **counts})

    def samples(self) -> Iterator[DamageSample]:
        """A sample for each `where` that a worker has ever reported, also where the count is 0."""
        totals = dict(self._before)
        for name, (_, role, counts) in self._now.items():
            for where, value in counts.items():
                _add(totals, (name, role, where), value)
        for (name, role, where), value in sorted(totals.items()):
            yield DamageSample(name, role, where, value)


def _counts(counters: Mapping[str, float]) -> dict[str, float]:
    """The damage counters summed by `where`: several counters may count the same."""
    out: dict[str, float] = {}
    for name, value in counters.items():
        where = where_of(name)
        if where is not None:
            _add(out, where, value)
    return out


def _add(totals: dict[K, float], key: K, value: float) -> None:
    totals[key] = totals.get(key, 0.0) + value
